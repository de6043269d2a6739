"""DFlash2: DFlash with convolutions inside a block, and a selector that orders the best drafts of each slot.

A slot's own logits name `selector_top_k` candidates; the selector adds a score that depends on the token
before, so drafts are chosen slot by slot, each after the drafter's own choice before it. In training the
token before is the text's. Slots and targets are DFlash's (z-lab's DFlash2DraftModel and its `propose`).
"""

import torch
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dflash2.metrics import compute_selector_loss, selector_training_candidates
from torch import nn

from draftmill import block_drafter, block_drafts, block_targets
from draftmill.block_drafter import check_target, entry, initialise, load
from draftmill.block_targets import DPACE_ALPHA, Blocks, length, prepared
from draftmill.errors import DraftmillError
from draftmill.predictions import Predictions
from draftmill.speculators_drafter import empty, new_drafter
from draftmill.target_head import TargetHead

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
HEADS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def config_of(
    settings: dict, manifest: dict, device: str, draft_vocab_size: int
) -> DFlash2SpeculatorConfig:
    """speculators' configuration of a new drafter for this target.

    Raises DraftmillError where the target's sizes do not suit the convolutions or the selector.
    """
    slots = settings["block_size"] - FIRST
    fields = block_drafter.fields(settings, manifest, device, "dflash2", slots)
    group, hidden = settings["conv_group_size"], fields["transformer_layer_config"].hidden_size
    if hidden % group:
        raise DraftmillError(
            f"config: conv_group_size is {group}, but must divide the hidden size of the target "
            f"{manifest['name']}, {hidden}."
        )
    if settings["selector_top_k"] > draft_vocab_size:
        raise DraftmillError(
            f"config: selector_top_k is {settings['selector_top_k']}, but the target {manifest['name']} knows "
            f"{draft_vocab_size} tokens; take fewer candidates."
        )
    heads = {key: settings[key] for key in HEADS}
    return DFlash2SpeculatorConfig(**fields, **heads, draft_vocab_size=draft_vocab_size)


def heads(drafter: DFlash2DraftModel) -> list[nn.Module]:
    """What makes logits, and scores of candidates, of the drafter's states."""
    return [drafter.lm_head, drafter.candidate_selector]


class WithTargets(block_targets.WithTargets):
    """A DFlash2 drafter whose training targets come from the target's own head.

    Its predictions are the logits before the selector, whose own loss is added to theirs.
    """

    first = FIRST

    def __init__(self, drafter: DFlash2DraftModel, head: TargetHead, settings: dict):
        super().__init__(drafter, head, settings)
        self.alpha = settings["training"]["selector_loss_alpha"]

    def head_loss(self, blocks: Blocks, found: Predictions) -> torch.Tensor:
        """The selector's cross-entropy over its candidates against the target's choice, which takes the place
        of the last candidate where it is none of them."""
        selector = self.drafter.candidate_selector
        likely = found.logits.topk(selector.top_k).indices
        candidates, place, _ = selector_training_candidates(likely, found.targets.argmax(-1))
        states, known = blocks.states.flatten(0, 1), blocks.known.flatten()
        scores = selector.score_candidates(found.logits, states, known, candidates)
        return self.alpha * compute_selector_loss(
            scores[None],
            place[None],
            blocks.scored.reshape(1, -1),
            self.count,
            gamma=self.gamma,
            per_position_loss_weight="dpace" if self.dpace and self.training else "fixed-exp-decay",
            dpace_alpha=DPACE_ALPHA,
            sample_from_anchor=True,  # the first draft of a row counts fully
        )

    def chosen(self, blocks: Blocks, found: Predictions) -> torch.Tensor:
        selector = self.drafter.candidate_selector
        states, known = blocks.states.flatten(0, 1), blocks.known.flatten()
        candidates, scores = selector.select(found.logits, states, known)
        return best(candidates, scores)


def best(candidates: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """[..., candidates] -> the id with the highest score, [...]."""
    return candidates.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)


def drafts(
    model: DFlash2DraftModel,
    sample: dict[str, torch.Tensor],
    steps: int,
    start: int = 1,
    end: int | None = None,
) -> torch.Tensor:
    """As dflash.drafts: each draft is the selector's choice after the drafter's own draft before it, the first
    one's after the anchor."""

    def select(states: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        unary, known, found = block_drafter.head_logits(model, states), anchors, []
        for slot in range(states.shape[1]):
            candidates, scores = model.candidate_selector.select(
                unary[:, slot], states[:, slot], known
            )
            known = best(candidates, scores)
            found.append(known)
        return torch.stack(found, dim=1)

    return block_drafts.proposed(model, sample, steps, start, end, FIRST, select, states)


def states(
    model: DFlash2DraftModel,
    aux: torch.Tensor,
    ids: torch.Tensor,
    documents: torch.Tensor,
    positions: torch.Tensor,
    anchors: torch.Tensor,
    block: int,
) -> torch.Tensor:
    """block_drafter.states, with convolutions that end where blocks of this size do."""
    for layer in model.layers:
        layer.attention_conv.block_size = layer.mlp_conv.block_size = block
    return block_drafter.states(model, aux, ids, documents, positions, anchors, block)
