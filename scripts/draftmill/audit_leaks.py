"""What a draft may see: found by changing what it must not see, and looking for any change of its logits.

Changed inputs keep every shape, so what does not see them must give the same bits; that they do change what
may see them shows that the change was real.
"""

import torch

from draftmill.audit_checks import require
from draftmill.audit_packs import Pack
from draftmill.audit_rig import Drafts, Rig
from draftmill.audited import Audited

ROUNDING = 1e-3  # of logits in fp32 between packs of other sizes, of their root mean square
FAR = 20.0  # a change of a state, in its own root mean squares


def changed(sample: dict, states: slice, tokens: slice, vocab: int) -> dict:
    """A sample with other states and other tokens at these places."""
    made = dict(sample)
    for name in ("aux", "last"):
        made[name] = sample[name].clone()
        part = made[name][states].float()
        size = part.square().mean().sqrt() if part.numel() else 0.0
        made[name][states] = (part + size * torch.randn_like(part)).to(made[name].dtype)
    made["input_ids"] = sample["input_ids"].clone()
    ids = made["input_ids"][tokens]
    made["input_ids"][tokens] = (ids + 1 + torch.randint_like(ids, vocab - 1)) % vocab
    return made


class Changes:
    """Runs a pack with one of its samples changed, and tells which drafts' logits that moved."""

    def __init__(self, audited: Audited, rig: Rig, pack: Pack):
        self.trainer, self.rig, self.pack = audited.training.trainer, rig, pack
        self.vocab = audited.training.manifest["vocab_size"]
        self.batch = pack.batch(self.trainer)
        self.drafts: Drafts = audited.drafts(pack, self.batch)
        self.logits = rig.run(self.batch).logits

    def moved(self, number: int, states: slice, tokens: slice) -> torch.Tensor:
        """bool [drafts]: whose logits differ in any bit."""
        samples = list(self.pack.samples)
        samples[number] = changed(samples[number], states, tokens, self.vocab)
        batch = self.pack.batch(self.trainer, samples)
        return (self.rig.run(batch).logits != self.logits).any(-1).cpu()


def states(audited: Audited) -> dict:
    """No draft sees a state at or after its anchor, nor a token that it is not fed; all see the state before."""
    nothing, tried = slice(0, 0), 0
    for rig in (audited.real, audited.exact):
        with torch.random.fork_rng():
            changes = Changes(audited, rig, audited.small)
            number = len(audited.small.documents) // 2
            own = changes.drafts.document == number
            anchors = changes.drafts.anchor[own].unique()
            anchors = anchors[anchors > 0]  # before the first token there is no state
            for anchor in anchors[[len(anchors) // 3, -1]].tolist():
                for place in (anchor, anchor + 1):
                    after = slice(place, None)
                    moved = changes.moved(number, after, nothing) & own
                    seen = moved & (changes.drafts.anchor <= place)
                    require(
                        not seen.any(),
                        f"{int(seen.sum())} drafts changed with states at or after their anchor (states from "
                        f"token {place} on, {rig.name}); the drafter reads the answer; look at the shift of "
                        "the samples (prepared) and at the attention mask.",
                    )
                    after = slice(place + 1, None)
                    moved = changes.moved(number, nothing, after) & own
                    seen = moved & (changes.drafts.known <= place)
                    require(
                        not seen.any(),
                        f"{int(seen.sum())} drafts changed with tokens that they are not fed (tokens from "
                        f"{place + 1} on, {rig.name}); the drafter reads the answer; look at what is fed to "
                        "embed_tokens.",
                    )
                before = slice(anchor - 1, anchor)
                moved = changes.moved(number, before, nothing)
                blind = own & (changes.drafts.anchor == anchor) & ~moved
                require(
                    not blind.any(),
                    f"{int(blind.sum())} drafts of the anchor {anchor} do not see the state just before it "
                    f"({rig.name}), so the drafter lacks its best input; look at the shift of the samples "
                    "(prepared) and at the attention mask.",
                )
                tried += 1
    return {"anchors": tried, "drafts": int(own.sum())}


def documents(audited: Audited) -> dict:
    """A draft sees nothing of another document of its pack."""
    whole, compared = slice(None), 0
    for rig in (audited.real, audited.exact):
        with torch.random.fork_rng():
            changes = Changes(audited, rig, audited.small)
            for number in (0, len(audited.small.documents) - 1):
                moved = changes.moved(number, whole, whole)
                others = (changes.drafts.document >= 0) & (changes.drafts.document != number)
                require(
                    not (moved & others).any(),
                    f"{int((moved & others).sum())} drafts changed with another document of their pack "
                    f"({rig.name}); look at document_ids and the attention mask.",
                )
                own = changes.drafts.document == number
                require(
                    moved[own].all(),
                    f"{int((~moved[own]).sum())} drafts did not change though everything of their document did "
                    f"({rig.name}); look at the attention mask.",
                )
                compared += int(others.sum())
    return {"drafts": compared}


def packing(audited: Audited) -> dict:
    """A conversation gives the same logits alone and in a pack: nothing hangs on its place in the row."""
    trainer, rig, worst = audited.training.trainer, audited.exact, 0.0
    batch = audited.small.batch(trainer)
    together, drafts = rig.run(batch).logits, audited.drafts(audited.small, batch)
    for number in range(len(audited.small.documents)):
        pack = audited.small.alone(number)
        batch = pack.batch(trainer)
        alone, own = rig.run(batch).logits, audited.drafts(pack, batch)
        kept = own.document >= 0
        there = drafts.document == number
        require(
            int(kept.sum()) == int(there.sum()),
            f"a conversation has {int(kept.sum())} drafts alone and {int(there.sum())} in a pack; look at how "
            "its anchors are drawn.",
        )
        difference = (alone[kept] - together[there]).abs().max()
        worst = max(worst, float(difference / together[there].square().mean().sqrt()))
    require(
        worst <= ROUNDING,
        f"a conversation's logits differ by {worst:.2g} of their size alone and in a pack (rounding gives at most "
        f"{ROUNDING}); look at position_ids and document_ids: positions count from the conversation's start.",
    )
    return {"difference": worst, "tolerance": ROUNDING}


def attention(audited: Audited) -> dict:
    """Every layer of a draft at the end of a long conversation sees what it should: all, or its window."""
    settings = audited.settings
    config = audited.training.config.transformer_layer_config
    window = audited.companion.windows(settings)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    meant = "full_attention" if window is None else "sliding_attention"
    require(
        set(kinds) == {meant},
        f"the drafter's layers are {', '.join(sorted(set(kinds)))}, expected {meant} in all of them; look at "
        "full_attention_indices: a layer that is not listed slides, by default over a window of its own.",
    )
    require(
        window is None or config.sliding_window == window,
        f"the drafter's sliding window is {config.sliding_window}, but sliding_window is {window}.",
    )
    trainer, pack = audited.training.trainer, audited.long
    batch = pack.batch(trainer)
    drafts = audited.drafts(pack, batch)
    anchor = int(drafts.anchor[drafts.document >= 0].max())
    last = (drafts.anchor == anchor) & (drafts.document >= 0) & (drafts.slot == 1)
    size = batch["aux"].float().square().mean().sqrt() * FAR
    places = {0: True} if window is None or anchor <= window else {0: False, anchor - window: True}
    base = audited.exact.run(batch).logits
    for index, layer in enumerate(audited.exact.drafter.layers):
        for place, visible in places.items():
            hook = audited.companion.nudged(layer, place, size.to(base.device))
            try:
                moved = bool((audited.exact.run(batch).logits != base).any(-1).cpu()[last].any())
            finally:
                hook.remove()
            require(
                moved == visible,
                f"layer {index} of the drafter {'sees' if moved else 'does not see'} the state of token {place} "
                f"from the anchor {anchor}, though it {'may not' if moved else 'should'}; look at the layer's "
                "sliding window and its attention mask.",
            )
    return {"layers": len(kinds), "window": window, "anchor": anchor, "places": list(places)}
