"""The targets and the states: no noise reaches what the drafter is trained towards, and layers are the ones named."""

import torch
from torch import nn

from draftmill import shard_layout
from draftmill.audit_checks import require
from draftmill.audit_rig import SEED
from draftmill.audited import CHUNK, Audited

NOISE = 0.1  # forced, whatever the settings say
LOOKED_AT = 8  # validation samples whose text is compared with the head's choice
LEAST = 0.1  # of their tokens, for text that is not the target's own
MARGIN = 0.02  # of the tokens, and CHANCE more, are what near-ties in bf16 decide
CHANCE = 3


def noise(audited: Audited) -> dict:
    """Noise changes the drafter's logits in training and nothing else at any time."""
    rig, trainer = audited.real, audited.training.trainer
    batch = audited.small.batch(trainer)
    kept = {name: value.clone() for name, value in batch.items()}
    before, runs = rig.model.noise, {}
    try:
        for scale in (0.0, NOISE):
            rig.model.noise = scale
            for training in (False, True):
                runs[scale, training] = rig.run(batch, training=training)
                rig.model.train(training)
                with torch.no_grad(), trainer.accelerator.autocast(), torch.random.fork_rng():
                    runs[scale, training].targets.append(
                        rig.model.predict(rig.placed(batch)).targets
                    )
    finally:
        rig.model.noise = before
    touched = [name for name, value in kept.items() if not torch.equal(value, batch[name])]
    require(
        not touched,
        f"the step changed its own batch ({', '.join(touched)}); noise is added in place; look at "
        "input_noise.noised.",
    )
    quiet = runs[0.0, False]
    for (scale, training), seen in runs.items():
        same = all(torch.equal(a, b) for a, b in zip(seen.targets, quiet.targets, strict=True))
        require(
            same,
            f"the targets differ with noise {scale} in {'training' if training else 'evaluation'}; the drafter is "
            "trained towards noise; look at where noise is added: never before the target's head.",
        )
        moved = not torch.equal(seen.logits, quiet.logits)
        require(
            moved == (scale > 0 and training),
            f"the drafter's logits {'change' if moved else 'do not change'} with noise {scale} in "
            f"{'training' if training else 'evaluation'}; look at input_noise.noised and at model.training.",
        )
    count = sum(t.numel() for t in quiet.targets)
    return {"forced": NOISE, "configured": before, "target_logits_compared": count}


def layers(audited: Audited) -> dict:
    """The drafter reads the layers that the settings name, in their order; the last states are pre-norm."""
    training, manifest = audited.training, audited.training.manifest
    wanted, config = audited.settings["layers"]["output_of"], training.config
    ids = getattr(config, "aux_hidden_state_layer_ids", None)
    ids = ids or getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    require(
        ids == [layer + 1 for layer in wanted],
        f"the drafter's layer ids are {ids}, but output_of {wanted} is {[w + 1 for w in wanted]} by speculators' "
        "count (the output of layer i is its i + 1); serving would feed it other layers; look at config_of.",
    )
    require(
        manifest["layers"] - 1 not in wanted,
        f"layers.output_of {wanted} holds the final layer {manifest['layers'] - 1}, whose state is the answer but "
        "for the norm; the drafter would learn a short cut; name layers before it.",
    )
    drafter, hidden = training.drafter, manifest["hidden_size"]
    require(
        drafter.fc.in_features == len(wanted) * hidden,
        f"fc takes {drafter.fc.in_features} values, but {len(wanted)} layers of {hidden} are "
        f"{len(wanted) * hidden}; look at config_of.",
    )
    data = training.data["train"]
    names = [shard_layout.column_of(layer) for layer in wanted]
    stored = data.columns(0, [*names, shard_layout.LAST])
    sample = data[0]
    for number, name in enumerate(names):
        part = sample["aux"][:, number * hidden : (number + 1) * hidden]
        require(
            torch.equal(part, stored[name]),
            f"block {number} of the drafter's states is not the shard's column {name}; look at StateDataset.",
        )
        require(
            not torch.equal(part, stored[shard_layout.LAST]),
            f"the shard's column {name} holds the states after the last layer, which are the answer but for the "
            "norm; look at capture.py.",
        )
    columns(audited, hidden)
    return {"ids": ids, "in_features": drafter.fc.in_features} | text(audited)


@torch.no_grad()
def columns(audited: Audited, hidden: int) -> None:
    """Each layer's states enter the drafter, by their own block of fc."""
    rig, trainer = audited.exact, audited.training.trainer
    batch, weight = audited.small.batch(trainer), rig.drafter.fc.weight
    start = weight.clone()
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        weight.normal_(std=hidden**-0.5)  # a start from the target's layers leaves blocks of zeros
    base = rig.run(batch).logits
    for number in range(len(audited.settings["layers"]["output_of"])):
        part = slice(number * hidden, (number + 1) * hidden)
        without = batch | {"aux": batch["aux"].clone()}
        without["aux"][..., part] = 0
        require(
            not torch.equal(rig.run(without).logits, base),
            f"block {number} of the drafter's states changes no logit; look at what enters fc.",
        )
    weight.copy_(start)


@torch.no_grad()
def text(audited: Audited) -> dict:
    """What the head makes of the stored last states: shares of the validation answers' tokens that are its
    choice, with the final norm once, not at all and twice."""
    data = audited.training.data["validation"]
    dtype = audited.real.dtype
    head = audited.head(dtype)
    norm = head.norm
    norms = {"once": norm, "never": nn.Identity(), "twice": nn.Sequential(norm, norm)}
    right, likely, total = dict.fromkeys(norms, 0), 0.0, 0
    for index in range(min(LOOKED_AT, len(data))):
        sample, start = data[index], data.about(index)["start"]
        states = sample["last"][start:-1].to(audited.real.device)
        tokens = sample["input_ids"][start + 1 :].to(states.device)
        total += len(tokens)
        for some, wanted in zip(states.split(CHUNK), tokens.split(CHUNK), strict=True):
            for name, used in norms.items():
                head.norm = used
                logits = head(some[None])[0].float()
                right[name] += int((logits.argmax(-1) == wanted).sum())
                if name == "once":
                    likely += float(logits.log_softmax(-1).gather(-1, wanted[:, None]).sum())
    head.norm = norm
    shares = {name: count / max(1, total) for name, count in right.items()}
    look = (
        "the states are not those that this head reads; look at the extraction (states before the final norm) "
        "and at head.safetensors (this target's?)."
    )
    require(
        not total or shares["once"] >= LEAST,
        f"the head's choice after the stored last states is the text's in {shares['once']:.1%} of {total} tokens "
        f"of validation answers, expected at least {LEAST:.0%}; {look}",
    )
    limit = right["once"] + MARGIN * total + CHANCE
    worse = [n for n in ("never", "twice") if right[n] > limit]
    require(
        not worse,
        f"the head's choice after the stored last states is the text's in {shares['once']:.1%} of {total} tokens of "
        f"validation answers with the final norm once, and in {shares[worse[0]] if worse else 0:.1%} with it "
        f"{' and '.join(worse)}; {look}",
    )
    return {"text": shares, "tokens": total, "mean_log_probability": likely / max(1, total)}
