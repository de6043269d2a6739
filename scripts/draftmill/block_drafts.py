"""What a block drafter would propose at every anchor of a sample, in teacher-forced passes."""

from collections.abc import Callable, Iterator

import torch
from speculators.models.dflash import DFlashDraftModel
from torch import nn

from draftmill import block_drafter

ANCHORS_AT_ONCE = 64  # bounds the masks
PADDED_TO = 128  # flex attention's masks are made of whole blocks


@torch.inference_mode()
def proposed(
    model: DFlashDraftModel,
    sample: dict[str, torch.Tensor],
    steps: int,
    start: int,
    end: int | None,
    first: int,
    choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    states_of: Callable[..., torch.Tensor] = block_drafter.states,
) -> torch.Tensor:
    """`drafts` (see dflash.py) of any block drafter.

    first: the first slot that drafts. choose: states [anchors, drafts, hidden] and the ids of their anchors ->
    the target vocabulary's ids of the drafts [anchors, drafts]. states_of: block_drafter.states or what stands for it.
    """
    device, ids = model.fc.weight.device, sample["input_ids"]
    padding = -len(ids) % PADDED_TO if device.type == "cuda" else 0
    aux = nn.functional.pad(sample["aux"], (0, 0, 0, padding)).to(device)
    padded = nn.functional.pad(ids, (0, padding)).to(device)
    documents = torch.zeros(len(padded), dtype=torch.long, device=device)
    documents[len(ids) :] = -1
    positions = torch.arange(len(padded), device=device)
    rows = torch.full((len(ids) - 1, steps), -1)
    for count, places in blocks_of(start, len(ids), steps, end):
        anchors = places.to(device)
        states = states_of(model, aux, padded, documents, positions, anchors, count + first)
        rows[places - 1, :count] = choose(states[:, first:], padded[anchors]).cpu()
    return rows


def target_ids(model: DFlashDraftModel, found: torch.Tensor) -> torch.Tensor:
    """The target vocabulary's ids of the draft vocabulary's."""
    return found if model.d2t is None else found + model.d2t[found]


def blocks_of(
    start: int, tokens: int, steps: int, end: int | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """(slots after the anchor, anchors) in groups that share their number of slots."""
    full = tokens if end is None else min(tokens, max(start, end - steps))
    for first in range(start, full, ANCHORS_AT_ONCE):
        yield steps, torch.arange(first, min(full, first + ANCHORS_AT_ONCE))
    for anchor in range(full, tokens - 1):
        yield end - 1 - anchor, torch.tensor([anchor])
