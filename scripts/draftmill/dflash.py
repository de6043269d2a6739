"""DFlash: speculators' block drafter, with anchors per document and the target's own head for the targets.

Slot 0 of a block holds the anchor, the last token known; slot k drafts the token k places after it and is
trained against the target's logits for that token (arXiv 2602.06036; z-lab's dflash_generate).
"""

import torch
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from torch import nn

from draftmill import block_drafter, block_drafts, block_targets
from draftmill.block_drafter import check_target, entry, initialise, load
from draftmill.block_targets import length, prepared
from draftmill.speculators_drafter import empty, new_drafter

__all__ = [  # of every block drafter
    "check_target",
    "empty",
    "entry",
    "initialise",
    "length",
    "load",
    "new_drafter",
    "prepared",
]
DRAFTING = "block"
FIRST = 1  # the first slot that drafts: slot 0's output is not read


def config_of(
    settings: dict, manifest: dict, device: str, draft_vocab_size: int
) -> DFlashSpeculatorConfig:
    """speculators' configuration of a new drafter for this target."""
    slots = settings["block_size"] - FIRST
    return DFlashSpeculatorConfig(
        **block_drafter.fields(settings, manifest, device, "dflash", slots),
        draft_vocab_size=draft_vocab_size,
    )


def drafted(
    model: DFlashDraftModel,
    aux: torch.Tensor,
    ids: torch.Tensor,
    documents: torch.Tensor,
    positions: torch.Tensor,
    anchors: torch.Tensor,
    block: int,
) -> torch.Tensor:
    """Logits of every block's slots after the anchor: [anchors, block - 1, draft vocabulary].

    See block_drafter.states for the arguments.
    """
    states = block_drafter.states(model, aux, ids, documents, positions, anchors, block)
    return block_drafter.head_logits(model, states[:, FIRST:])


def heads(drafter: DFlashDraftModel) -> list[nn.Module]:
    """What makes logits of the drafter's states."""
    return [drafter.lm_head]


class WithTargets(block_targets.WithTargets):
    """A DFlash drafter whose training targets come from the target's own head."""

    first = FIRST


def drafts(
    model: DFlashDraftModel,
    sample: dict[str, torch.Tensor],
    steps: int,
    start: int = 1,
    end: int | None = None,
) -> torch.Tensor:
    """What the drafter would propose at every anchor of a sample, in teacher-forced passes.

    sample: input_ids [tokens], aux [tokens, layers * hidden]. start: the first anchor. end: no block reaches
    past this many tokens, more or fewer than there are: prompt and length limit of an answer (z-lab's loop
    shortens the blocks before it, where the answer ends by itself too).
    Returns int64 [tokens - 1, steps]: row j, with token j+1 (the anchor) the last one known, holds the target
    vocabulary's ids of the drafts for tokens j+2, j+3, ...; -1 in rows and places that are not drafted.

    A block is drafted at once, from states before its anchor alone, so this is what a loop would draft.
    """

    def greedy(states: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        return block_drafts.target_ids(model, block_drafter.head_logits(model, states).argmax(-1))

    return block_drafts.proposed(model, sample, steps, start, end, FIRST, greedy)
