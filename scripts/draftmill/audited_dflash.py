"""What DFlash's step should do, written from its description and not from its code (arXiv 2602.06036).

A block is an anchor, the last token known, and mask tokens for those after it. It sees the states before the
anchor, and itself. Slot k drafts token anchor + k against the target's distribution after token anchor + k - 1;
it counts while every token from anchor + 1 up to its own is an answer's. Slot 0 never counts.
"""

import math

import torch

from draftmill.audit_checks import require
from draftmill.audit_heads import NoHeads
from draftmill.audit_packs import Pack
from draftmill.audit_rig import Drafts, Seen
from draftmill.audited import Audited

Heads = NoHeads
EPSILON = 1e-5  # of speculators' mean
PUBLISHED = {16: 7.0, 10: 5.0, 8: 4.0}  # block -> gamma
SMOOTHING = 0.5  # D-PACE's alpha
SCANNED = 4096  # samples that are searched for the mask token


def drafts(pack: Pack, batch: dict[str, torch.Tensor], settings: dict, first: int = 1) -> Drafts:
    """All blocks one after the other, each with its slots from `first` on, which drafts the token after the
    anchor."""
    slots = settings["block_size"] - first
    document, row = pack.places(batch["input_ids"].shape[1])
    rows = batch["anchors"][0].cpu().nonzero().flatten()
    document, anchor = document[rows], row[rows]
    scored = torch.zeros(len(rows), slots, dtype=torch.bool)
    for index, (number, a) in enumerate(zip(document.tolist(), anchor.tolist(), strict=True)):
        mask = pack.samples[number]["loss_mask"][: pack.documents[number].tokens]
        for k in range(1, slots + 1):
            if a + k >= len(mask) or not mask[a + k]:
                break
            scored[index, k - 1] = True
    ends = torch.tensor([d.tokens for d in pack.documents])
    slot = torch.arange(1, slots + 1).repeat(len(rows))
    spread = [t.repeat_interleave(slots) for t in (document, anchor, rows)]
    return Drafts(
        document=spread[0],
        anchor=spread[1],
        slot=slot,
        inside=spread[1] + slot < ends[document].repeat_interleave(slots),
        known=spread[1],
        scored=scored.flatten(),
        position=spread[2] + slot,
        first_unseen=spread[2],
    )


def weights(
    found: Drafts, confidence: torch.Tensor, settings: dict, first: int = 1
) -> torch.Tensor:
    """fp64 [drafts]: how each counts, by its slot or by D-PACE.

    confidence: fp64 [drafts], the probability that each draft gives to the target's choice.
    """
    if settings["training"]["position_weights"] == "exponential":
        return scaled(found, settings)
    return smoothed(found, confidence, settings, first)


def scaled(found: Drafts, settings: dict, epsilon: float = EPSILON) -> torch.Tensor:
    """fp64 [drafts]: exp(-(slot - 1) / gamma) over the number of scored slots."""
    block = settings["block_size"]
    gamma = settings["training"]["gamma"] or PUBLISHED.get(block, block * PUBLISHED[16] / 16)
    decay = torch.exp(-(found.slot - 1).double() / gamma)
    return decay * found.scored / (int(found.scored.sum()) + epsilon)


def smoothed(
    found: Drafts, confidence: torch.Tensor, settings: dict, first: int = 1
) -> torch.Tensor:
    """fp64 [drafts]: D-PACE's weights over the number of scored slots."""
    slots = settings["block_size"] - first
    scored = found.scored.view(-1, slots).double()
    smooth = (1 - SMOOTHING) * confidence.view(-1, slots) + SMOOTHING
    reached = smooth.where(scored > 0, torch.ones_like(smooth)).cumprod(-1) * scored
    weight = (reached.flip(-1).cumsum(-1).flip(-1) * scored).flatten()
    return weight / (int(found.scored.sum()) + EPSILON)


def wrong_inputs(
    seen: Seen, found: Drafts, pack: Pack, batch: dict, config, first: int = 1
) -> str | None:
    """What is wrong with tokens, slots or positions of a step that was watched, as part of a sentence."""
    block = config.block_size
    each = slice(None, None, block - first)
    document, anchor = found.document[each].tolist(), found.anchor[each].tolist()
    slots = torch.full((len(anchor), block), config.mask_token_id)
    masks = [sample["loss_mask"] for sample in pack.samples]
    for index, (number, a) in enumerate(zip(document, anchor, strict=True)):
        if number < 0 or not masks[number][a]:
            return "slots: an anchor is no token of an answer"
        slots[index, 0] = pack.samples[number]["input_ids"][a]
    fed = torch.cat([call.flatten() for call in seen.embedded]).cpu()
    if not torch.equal(fed, slots.flatten()):
        return "slots: a block is not its anchor and then mask tokens"
    if len(seen.projected) != 1 or len(seen.normed) != 1:
        return "slots: lm_head is called more than once a step"
    normed = seen.normed[0].view(len(anchor), block, -1)[:, first:].flatten(0, 1)
    if not torch.equal(seen.projected[0].flatten(0, -2).to(normed.dtype), normed):
        return f"slots: the drafts are not those of a block's slots, from slot {first} on"
    places = pack.places(batch["input_ids"].shape[1])[1]
    context, blocks = seen.rotated[0].flatten().cpu().split([len(places), len(anchor) * block])
    expected = torch.tensor(anchor)[:, None] + torch.arange(block)
    inside = places >= 0
    if not torch.equal(context[inside], places[inside]):
        return "positions: states are not rotated by their token's place in the conversation"
    if not torch.equal(blocks, expected.flatten()):
        return "positions: slots are not rotated by anchor + slot in the conversation"
    return None


def nudged(layer: torch.nn.Module, place: int, size: torch.Tensor):
    """A hook that changes what a layer sees of packed row `place` of the context."""

    def change(module, args, kwargs):
        context = kwargs["target_hidden"].clone()
        context[:, place] += size * torch.randn_like(context[:, place])
        return args, kwargs | {"target_hidden": context}

    return layer.register_forward_pre_hook(change, with_kwargs=True)


def made_random(drafter: torch.nn.Module) -> None:
    """Takes from a drafter with random layers what its residual stream starts from: where embedding and lm_head are
    tied, the mask token's own embedding makes that token, and those like it, likely."""
    row = drafter.embed_tokens.weight.data[drafter.config.mask_token_id]
    size = row.square().mean().sqrt().clamp_min(1e-3)
    row.copy_(torch.randn(row.shape).to(row) * size)


def windows(settings: dict) -> int | None:
    """Context positions that a block sees; None for all."""
    return settings["sliding_window"]


def mask_token(audited: Audited) -> dict:
    """The mask token stands for nothing else."""
    training = audited.training
    manifest, token = training.manifest, training.config.mask_token_id
    rows = training.drafter.embed_tokens.weight
    require(
        token is not None and 0 <= token < min(len(rows), manifest["embedding_rows"]),
        f"mask_token_id is {token}, but the target embeds {manifest['embedding_rows']} tokens; set "
        "drafters.NAME.mask_token_id to one of them.",
    )
    row = rows[token].float()
    require(
        torch.isfinite(row).all(),
        f"the embedding of the mask token {token} is not finite; look at the target's embedding.",
    )
    require(
        token not in manifest["stop_ids"],
        f"the mask token {token} is a stop token of the target, so slots would stand for ends of answers; "
        "set drafters.NAME.mask_token_id to a token that no text holds.",
    )
    scanned = total = 0
    for role, data in training.data.items():
        step = math.ceil(len(data) / SCANNED)
        for index in range(0, len(data), step):
            ids = data.columns(index, ["input_ids"])["input_ids"]
            require(
                not (ids == token).any(),
                f"the mask token {token} stands in sample {index} of the {role} data, so the drafter would take "
                "a real token for an unknown one; set drafters.NAME.mask_token_id to a token that no text holds.",
            )
            scanned += 1
        total += len(data)
    norm = math.sqrt(float(row.square().sum()))
    kept = bool(training.t2d[token]) if token < len(training.t2d) else False
    return {"token": token, "scanned": scanned, "samples": total, "norm": norm, "drafted": kept}


CHECKS = {"mask token": mask_token}
