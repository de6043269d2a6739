"""The loss, from the raw samples and in fp64: which tokens, against which target, how weighed."""

import math

import torch
from torch.nn.functional import log_softmax

from draftmill import audit_rig
from draftmill.audit_checks import require
from draftmill.audit_heads import Step
from draftmill.audit_packs import Pack
from draftmill.audit_rig import Drafts, Rig, Seen
from draftmill.audited import CHUNK, Audited
from draftmill.predictions import Predictions

EXACT = 1e-4  # relative, in fp32
TRAINED = 2e-2  # relative, where targets are rounded to bf16, which keeps 8 bits
GRADIENT = 1e-3  # relative to the gradient's norm, in fp32
DEVIATIONS = 5.0  # of the mean of step 0 that chance may give


def each(name: str, logits: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
    """fp64 losses [drafts] of logits against the target's [drafts, draft vocabulary], by their definitions."""
    q, p = log_softmax(logits.double(), -1), log_softmax(goals.double(), -1)
    if name == "ce":
        return -q.gather(-1, p.argmax(-1, keepdim=True))[:, 0]
    if name == "kl_div":
        return (p.exp() * (p - q)).sum(-1)
    if name == "rkl":
        return (q.exp() * (q - p)).sum(-1)
    if name == "tv":
        return (p.exp() - q.exp()).abs().sum(-1) / 2
    if name == "jsd":
        mixed = ((p.exp() + q.exp()) / 2).log()
        return ((p.exp() * (p - mixed)).sum(-1) + (q.exp() * (q - mixed)).sum(-1)) / 2
    raise ValueError(f"no loss {name}")


def reference(
    audited: Audited, pack: Pack, drafts: Drafts, rig: Rig, seen: Seen
) -> tuple[float, torch.Tensor]:
    """The loss that the step should have, and its gradient with respect to the scored logits, fp64.

    seen: the step. Only what is made of the logits of lm_head is in question here.
    """
    settings, scored = audited.settings, drafts.scored
    name = settings["training"]["loss"]
    goals = audited.goals(pack, drafts, rig)
    own = seen.logits[scored.to(goals.device)]
    heads = audited.companion.Heads(Step(rig, seen, drafts, pack, goals, settings))
    order = torch.arange(len(own), device=own.device)
    parts = list(zip(*(t.split(CHUNK) for t in (own, goals, order)), strict=True))
    confidence = torch.ones(len(scored), dtype=torch.float64)
    sure = [each("ce", heads.logits(z.double(), chosen), goal) for z, goal, chosen in parts]
    confidence[scored] = torch.exp(-torch.cat(sure)).cpu()
    weights = audited.companion.weights(drafts, confidence, settings)[scored]
    total, gradients = 0.0, []
    for (z, goal, chosen), weight in zip(parts, weights.to(own.device).split(CHUNK), strict=True):
        leaf = z.double().requires_grad_()
        with torch.enable_grad():
            loss = (each(name, heads.logits(leaf, chosen), goal) * weight).sum()
            loss = loss + heads.loss(leaf, goal, chosen)
        gradients += torch.autograd.grad(loss, leaf)
        total += float(loss.detach())
    return total, torch.cat(gradients)


def loss(audited: Audited) -> dict:
    """Loss and gradient of the step are those of the reference."""
    figures = {"loss": audited.settings["training"]["loss"]}
    for what, rig, pack, limit in (
        ("trained", audited.real, supervised_pack(audited), TRAINED),
        ("fp32", audited.exact, audited.edges, EXACT),
    ):
        batch = pack.batch(audited.training.trainer)
        drafts = audited.drafts(pack, batch)
        seen = rig.run(batch, training=True, gradients=True)
        found = float(seen.loss.detach())
        expected, gradient = reference(audited, pack, drafts, rig, seen)
        error = abs(found - expected) / max(abs(expected), 1e-3)
        figures[what] = {"step": found, "reference": expected, "error": error, "tolerance": limit}
        require(
            error <= limit,
            f"the step's loss is {found:.6g} and the reference's {expected:.6g} ({rig.name}); look at the "
            "shift of the targets, the loss mask, the weights of the slots or steps, and the loss itself: the "
            "reference takes the target's logits after the token before the drafted one.",
        )
    parts = torch.autograd.grad(seen.loss, seen.parts)
    own = torch.cat([part.flatten(0, -2) for part in parts]).double()
    away = (drafts.scored == 0).to(own.device)
    error = (own[~away] - gradient).norm() / gradient.norm()
    figures["gradient"] = {"error": float(error), "tolerance": GRADIENT}
    require(
        error <= GRADIENT and not own[away].any(),
        f"the gradient of the loss at the drafter's logits differs from the reference's by {float(error):.2g} of its "
        f"norm, and is nonzero at {int(own[away].any(-1).sum())} drafts that are not scored; look at what is "
        "detached: weights and targets are constants.",
    )
    return figures


def supervised_pack(audited: Audited) -> Pack:
    """The first pack of the first epoch that trains something, else the small one."""
    for pack in audited.first:
        batch = pack.batch(audited.training.trainer)
        if audited.drafts(pack, batch).scored.any():
            return pack
    return audited.small


def predictions(audited: Audited, pack: Pack, rig: Rig) -> Predictions:
    batch = rig.placed(pack.batch(audited.training.trainer))
    rig.model.eval()
    with torch.no_grad(), audited.training.trainer.accelerator.autocast():
        return rig.model.predict(batch)


def masks(audited: Audited) -> dict:
    """What is scored are the answers' tokens, each by the mask of its own label."""
    figures = {}
    for name, pack in (("trained", supervised_pack(audited)), ("borders", audited.edges)):
        figures[name] = scored_right(audited, pack)
    return figures


def scored_right(audited: Audited, pack: Pack) -> dict:
    batch = pack.batch(audited.training.trainer)
    drafts = audited.drafts(pack, batch)
    seen = audited.real.run(batch)
    wrong = audited.companion.wrong_inputs(seen, drafts, pack, batch, audited.training.config)
    require(
        wrong is None or not wrong.startswith("slots"),
        f"{wrong}; look at what enters embed_tokens and lm_head.",
    )
    found = predictions(audited, pack, audited.real)
    scored, inside = (found.weights != 0).cpu(), drafts.inside
    require(
        drafts.scored.any() and scored.any(),
        "no token of the first packs carries a loss; look at the loss masks of the training sources (a chat "
        "template without generation markers) and at training.tokens_per_batch.",
    )
    outside = (found.position.cpu() != drafts.position)[inside & scored]
    require(
        not outside.any() and not (scored & ~inside).any(),
        f"{int(outside.sum())} scored drafts stand for other tokens than they say, and "
        f"{int((scored & ~inside).sum())} lie in another document than their anchor; look at document_ids and at "
        "the places of the slots.",
    )
    more, less = int((scored & ~drafts.scored).sum()), int((drafts.scored & ~scored).sum())
    require(
        not more and not less,
        f"{more} drafts are scored that no answer's mask allows, and {less} are not scored that it does; look at "
        "the shift of the loss mask: it moves with the labels, and slot 0 carries no loss.",
    )
    tokens = sum(d.tokens for d in pack.documents)
    share = sum(float(s["loss_mask"].sum()) for s in pack.samples) / tokens
    return {"scored": int(scored.sum()), "drafts": len(scored), "answer_share": share}


def step_0(audited: Audited) -> dict:
    """A drafter with random layers knows nothing: its cross-entropy is that of chance.

    Random states of unit root mean square give normal logits of variance s^2, the mean square norm of lm_head's
    rows about their mean, independent of the target's choice: E[-log q] = ln V + s^2 / 2, a choice of the
    target deviating from it by s. Drafts of one choice are not independent, so the mean over n distinct
    choices deviates by s / sqrt(n); rows of unequal norm widen that (DEVIATIONS). Real states point in few
    directions, so the excess is more (SmolLM2, tied embeddings: s^2), and 2 s^2 is allowed; logits of three times the
    size have 4.5 s^2.
    """
    training, pack = audited.training, audited.small
    rig = audit_rig.exact(training, audited.algorithm)
    with torch.random.fork_rng():
        torch.manual_seed(audit_rig.SEED)
        audited.companion.made_random(rig.drafter)
    batch = pack.batch(training.trainer)
    drafts = audited.drafts(pack, batch)
    logits = rig.run(batch).logits[drafts.scored.to(rig.device)]
    goals = audited.goals(pack, drafts, rig)
    found = float(each("ce", logits, goals).mean())
    rows = rig.drafter.lm_head.weight.float()
    spread = float((rows - rows.mean(0)).square().sum(-1).mean().sqrt())
    chance = math.log(len(rows))
    distinct = len(goals.argmax(-1).unique())
    margin = DEVIATIONS * spread / math.sqrt(distinct) + 0.05 * chance
    low, high = chance - margin, chance + 2 * spread**2 + margin
    require(
        math.isfinite(found) and found >= low,
        f"a drafter with random layers has a cross-entropy of {found:.3f} against the target's choices, where "
        f"ln {len(rows)} = {chance:.3f} is chance and {low:.3f} the least that it gives; the answer reaches the "
        "logits by a way that is not learnt; look at fc's inputs and the attention mask.",
    )
    require(
        found <= high,
        f"a drafter with random layers has a cross-entropy of {found:.3f} against the target's choices, where "
        f"ln {len(rows)} = {chance:.3f} is chance and {high:.3f} the most that it gives; logits or states have the "
        "wrong scale; look at the drafter's final norm and lm_head.",
    )
    return {"cross_entropy": found, "ln_vocabulary": chance, "low": low, "high": high}
