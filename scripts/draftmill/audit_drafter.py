"""The drafter itself: what is frozen, its vocabulary, its rotary angles."""

import hashlib
import json
import tempfile
from pathlib import Path

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftmill import draft_vocab, exported_drafter
from draftmill.audit_checks import Fault, require
from draftmill.audit_loss import supervised_pack
from draftmill.audited import Audited
from draftmill.errors import DraftmillError
from draftmill.target_config import config_of, text_config
from draftmill.trainer import learning_rate
from draftmill.training_state import Progress, trainable

FROZEN = ("embed_tokens.weight", "lm_head.weight")
PRECISION = 1e-6  # relative, of fp32 frequencies


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def frozen(audited: Audited) -> dict:
    """One real step moves every trained tensor and no bit of the others. The last check: it trains."""
    training, drafter = audited.training, audited.training.drafter
    file = audited.file
    expected = {
        "embed_tokens.weight": file["embed_tokens.weight"][: len(drafter.embed_tokens.weight)],
        "lm_head.weight": file["lm_head.weight"][audited.kept],
    }
    own = dict(drafter.named_parameters())
    digests = {}
    for name, rows in expected.items():
        require(
            not own[name].requires_grad,
            f"{name} is trained, but it is the target's own; serving would use another; look at new_drafter.",
        )
        narrowed = own[name].detach().to("cpu", rows.dtype)
        digests[name] = digest(narrowed)
        require(
            digests[name] == digest(rows)
            and torch.equal(narrowed.to(own[name].dtype), own[name].cpu()),
            f"{name} of the drafter is not that of head.safetensors, at the rows of the draft vocabulary; it is "
            "another target's or another vocabulary's; look at new_drafter.",
        )
    trainer, model = training.trainer, training.model
    trained = trainable(model)
    before = {n: p.detach().clone() for n, p in own.items()}
    before |= {n: b.clone() for n, b in drafter.named_buffers()}
    batch = supervised_pack(audited).batch(trainer)
    batch = {k: v.to(audited.real.device) for k, v in batch.items()}
    model.train()
    # at the highest rate: others may be too small to move a weight of 1
    steps = range(trainer.settings["steps"])
    peak = max(steps, key=lambda step: learning_rate(step, trainer.settings))
    batches = iter([batch] * trainer.settings["gradient_accumulation"])
    trainer._step(batches, Progress(step=peak))
    after = dict(drafter.named_parameters()) | dict(drafter.named_buffers())
    names = {n.removeprefix("drafter.") for n in trained}
    changed = {n for n, value in before.items() if not torch.equal(value, after[n])}
    require(
        changed <= names,
        f"a step changed {', '.join(sorted(changed - names)[:5])}, which is not trained; look at the optimizer's "
        "parameters.",
    )
    moments = trainer.optimizer.state
    idle = [n for n, p in trained.items() if p not in moments or not moments[p]["exp_avg"].any()]
    require(
        not idle,
        f"no gradient reaches {', '.join(idle[:5])}; look at the forward pass and at what is detached.",
    )
    still = {n for n in names - changed if before[n].dtype == torch.float32}
    require(
        not still, f"a step did not change {', '.join(sorted(still)[:5])}; look at the optimizer."
    )
    return {"trained": len(names), "frozen": len(before) - len(names), "sha256": digests}


def vocabulary(audited: Audited) -> dict:
    """The maps of the draft vocabulary are those of its file, and consistent."""
    training, drafter = audited.training, audited.training.drafter
    t2d, d2t, manifest = training.t2d, training.d2t, audited.training.manifest
    if drafter.use_draft_vocab:
        own = drafter.t2d.bool().cpu(), drafter.d2t.cpu()
        try:
            draft_vocab.check(*own, "the drafter's maps")
        except DraftmillError as error:
            raise Fault(str(error)) from None
        require(
            torch.equal(own[0], t2d) and torch.equal(own[1], d2t),
            "the drafter's t2d and d2t are not those of its draft vocabulary's file; look at new_drafter.",
        )
    rows = drafter.lm_head.out_features
    require(
        rows == len(d2t) == int(t2d.sum()) and len(t2d) == manifest["vocab_size"],
        f"lm_head has {rows} rows, d2t {len(d2t)} and t2d {int(t2d.sum())} of {len(t2d)} tokens, but the target's "
        f"vocabulary is {manifest['vocab_size']}; look at config_of and build_draft_vocab.py.",
    )
    lost = [i for i in manifest["stop_ids"] if i < len(t2d) and not t2d[i]]
    require(
        not lost or len(d2t) < len(manifest["stop_ids"]),
        f"the stop tokens {lost} are not in the draft vocabulary, so the end of an answer is never drafted; look at "
        "build_draft_vocab.py.",
    )
    return {"drafted": len(d2t), "of": len(t2d), "stop_tokens": len(manifest["stop_ids"])}


def rotary(audited: Audited) -> dict:
    """The angles are those that the exported config gives, of the target's theta, at absolute positions."""
    training = audited.training
    own = training.drafter.rotary_emb.inv_freq
    require(
        own.dtype == torch.float32,
        f"the rotary frequencies are {own.dtype}, but must be float32: rounded ones are other angles than those "
        "that serve the drafter; look at dtype_policy.cast.",
    )
    with tempfile.TemporaryDirectory() as folder:
        training.config.save_pretrained(folder)
        again = exported_drafter.read_config(Path(folder))
        written = json.loads((Path(folder) / "config.json").read_text())["transformer_layer_config"]
    layers = again.transformer_layer_config
    rope = written.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    head = written.get("head_dim") or written["hidden_size"] // written["num_attention_heads"]
    if kind == "default":
        turned = int(head * rope.get("partial_rotary_factor", 1.0))
        powers = torch.arange(0, turned, 2, dtype=torch.float64) / turned
        expected = rope.get("rope_theta", 10000.0) ** -powers
    else:
        expected = ROPE_INIT_FUNCTIONS[kind](layers, "cpu")[0].double()
    found = own.double().cpu()
    require(
        found.shape == expected.shape
        and ((found - expected).abs() <= PRECISION * expected.abs()).all(),
        f"the {len(found)} rotary frequencies are not the {len(expected)} that the exported config.json gives "
        f"({json.dumps(rope)}, head_dim {head}); serving would turn by other angles; look at rope_parameters "
        "(theta, partial_rotary_factor, scaling) and rotary_emb.",
    )
    deviations = against_target(audited, rope)
    pack = supervised_pack(audited)
    batch = pack.batch(training.trainer)
    drafts = audited.drafts(pack, batch)
    seen = audited.real.run(batch)
    wrong = audited.companion.wrong_inputs(seen, drafts, pack, batch, training.config)
    require(
        wrong is None or not wrong.startswith("positions"),
        f"{wrong}; look at position_ids and block_positions.",
    )
    return {"frequencies": len(found), "rope": rope, "deviations": deviations}


def against_target(audited: Audited, rope: dict) -> dict:
    """Where the drafter's rotary parameters differ from the target's: only what a drafter may choose."""
    text = text_config(config_of(audited.training.manifest))
    theirs = getattr(text, "rope_parameters", None)
    if not isinstance(theirs, dict) or not theirs:
        return {"target": "has none"}
    if any(isinstance(value, dict) for value in theirs.values()):
        thetas = {v.get("rope_theta") for v in theirs.values() if isinstance(v, dict)}
        require(
            rope.get("rope_theta") in thetas,
            f"the drafter's rope_theta is {rope.get('rope_theta')}, the target's by kind of layer are "
            f"{sorted(t for t in thetas if t)}; look at drafter_layers.",
        )
        return {"target": "one for each kind of layer"}
    require(
        "rope_theta" not in theirs or rope.get("rope_theta") == theirs["rope_theta"],
        f"the drafter's rope_theta is {rope.get('rope_theta')}, the target's {theirs.get('rope_theta')}; the "
        "config says other angles than the target's; look at drafter_layers.",
    )
    keys = sorted({*theirs, *rope} - {"rope_theta"})
    pairs = {key: [rope.get(key), theirs.get(key)] for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
