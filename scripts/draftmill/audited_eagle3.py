"""What EAGLE-3's step should do, written from its description and not from its code.

Row j of a document holds token j+1 (the anchor) and the state of token j. At step k, counted from 1, it is fed
the text's own tokens up to j+k and drafts token j+1+k; the target's distribution for it is the one after token
j+k, which must be an answer's. The first steps - 1 tokens of a document train nothing.
"""

import torch

from draftmill.audit_heads import NoHeads
from draftmill.audit_packs import Pack
from draftmill.audit_rig import Drafts, Seen

CHECKS: dict = {}
Heads = NoHeads
EPSILON = 1e-5  # of speculators' mean


def drafts(pack: Pack, batch: dict[str, torch.Tensor], settings: dict) -> Drafts:
    """All steps one after the other, each with all packed rows."""
    size, steps = batch["input_ids"].shape[1], settings["ttt_steps"]
    document, row = pack.places(size)
    parts = []
    for k in range(1, steps + 1):
        known = row + k
        inside = document >= 0
        scored = torch.zeros(size, dtype=torch.bool)
        for number, d in enumerate(pack.documents):
            own = (document == number) & (known < d.tokens)
            inside &= own | (document != number)
            mask = pack.samples[number]["loss_mask"]
            scored[own] = mask[known[own]] & (known[own] >= steps)
        rows = torch.arange(size)
        slot = torch.full((size,), k)
        parts.append(
            (document.where(inside, -1), row + 1, slot, inside, known, scored, rows + k, rows + 1)
        )
    return Drafts(*(torch.cat(part) for part in zip(*parts, strict=True)))


def weights(found: Drafts, confidence: torch.Tensor, settings: dict) -> torch.Tensor:
    """fp64 [drafts]: each step is a mean over its scored rows, and counts `ttt_loss_decay` times as much as the
    one before."""
    weight = torch.zeros(len(found.slot), dtype=torch.float64)
    for k in range(1, settings["ttt_steps"] + 1):
        chosen = found.scored & (found.slot == k)
        weight[chosen] = settings["training"]["ttt_loss_decay"] ** (k - 1) / (
            int(chosen.sum()) + EPSILON
        )
    return weight


def wrong_inputs(seen: Seen, found: Drafts, pack: Pack, batch: dict, config) -> str | None:
    """What is wrong with tokens, slots or positions of a step that was watched, as part of a sentence."""
    ids = [sample["input_ids"] for sample in pack.samples]
    size = batch["input_ids"].shape[1]
    inside = found.document >= 0
    expected = torch.zeros(len(inside), dtype=torch.long)
    for number, tokens in enumerate(ids):
        own = found.document == number
        expected[own] = tokens[found.known[own]]
    fed = torch.cat([call.flatten() for call in seen.embedded]).cpu()
    if len(fed) != len(expected) or not torch.equal(fed[inside], expected[inside]):
        return "slots: the tokens fed at the steps are not the text's own, each step one further"
    rotated = torch.cat([call.flatten() for call in seen.rotated]).cpu()
    if len(rotated) != len(inside) or not torch.equal(rotated[inside], found.known[inside]):
        return "positions: rows are not rotated by the place of their token in the conversation"
    if any(len(p.flatten(0, -2)) != size for p in seen.projected):
        return "slots: lm_head does not see every row once a step"
    return None


def nudged(layer: torch.nn.Module, place: int, size: torch.Tensor):
    """A hook that changes what a layer sees of packed row `place`, at the first step."""
    calls = []

    def change(module, args, kwargs):
        calls.append(1)
        if len(calls) > 1:
            return None
        hidden = args[0].clone()
        hidden[:, place] += size * torch.randn_like(hidden[:, place])
        return (hidden, *args[1:]), kwargs

    return layer.register_forward_pre_hook(change, with_kwargs=True)


def made_random(drafter: torch.nn.Module) -> None:
    """Nothing: the residual stream starts from fc, which is random."""


def windows(settings: dict) -> int | None:
    """Context positions that a draft sees; None for all."""
    return None
