"""DSpark: DFlash that drafts from the anchor's slot on, with a Markov head and a confidence head.

Slot 0, which holds the anchor, drafts the token after it, so a block of B slots drafts B tokens: slot k drafts
the token at anchor + k + 1 and is trained against the target's logits at anchor + k. The Markov head adds logits
that depend on the token before, so drafts are chosen slot by slot, each after the drafter's own choice before
it; in training the token before is the text's. The confidence head predicts whether a draft will be
accepted, for engines that draft less where it is low; it changes no draft.
"""

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from draftmill import block_drafter, block_drafts, block_targets
from draftmill.block_drafter import check_target, entry, initialise, load
from draftmill.block_targets import Blocks, length, prepared
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
FIRST = 0  # the first slot that drafts: the anchor's own
HEADS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


def config_of(
    settings: dict, manifest: dict, device: str, draft_vocab_size: int
) -> DSparkSpeculatorConfig:
    """speculators' configuration of a new drafter for this target."""
    slots = settings["block_size"] - FIRST
    fields = block_drafter.fields(settings, manifest, device, "dspark", slots)
    heads = {key: settings[key] for key in HEADS}
    return DSparkSpeculatorConfig(
        **fields, **heads, sample_from_anchor=True, draft_vocab_size=draft_vocab_size
    )


def heads(drafter: DSparkDraftModel) -> list[nn.Module]:
    """What makes logits and confidence of the drafter's states."""
    found = [drafter.lm_head, drafter.markov_head, drafter.confidence_head]
    return [head for head in found if head is not None]


class WithTargets(block_targets.WithTargets):
    """A DSpark drafter whose training targets come from the target's own head."""

    first = FIRST

    def __init__(self, drafter: DSparkDraftModel, head: TargetHead, settings: dict):
        super().__init__(drafter, head, settings)
        self.alpha = settings["training"]["confidence_head_alpha"]
        ((self.distance, _),) = resolve_loss_config("tv", "eager").values()

    def logits(self, blocks: Blocks) -> torch.Tensor:
        bias = self.drafter.markov_head.block_bias(
            prev_token_ids=blocks.known, hidden_states=blocks.states
        )
        return super().logits(blocks) + bias

    def head_loss(self, blocks: Blocks, found: Predictions) -> torch.Tensor | float:
        """The confidence head's cross-entropy against the share of drafts that rejection sampling would accept,
        1 - total variation; always with exponential weights, since D-PACE's come from the token's loss."""
        head = self.drafter.confidence_head
        if head is None:
            return 0.0
        features = blocks.states
        if self.drafter.config.confidence_head_with_markov:
            before = self.drafter.markov_head.prev_embeddings(blocks.known)
            features = torch.cat([features, before.to(features.dtype)], dim=-1)
        with torch.no_grad():
            accepted = 1 - self.distance(found.logits[None], found.targets[None])[0]
        losses = binary_cross_entropy_with_logits(
            head(features).float().flatten(), accepted.float(), reduction="none"
        )
        weights = (self.decay(blocks.scored) * blocks.scored).flatten()
        return self.alpha * (losses * weights).sum() / (blocks.scored.sum() + 1e-8)


def drafts(
    model: DSparkDraftModel,
    sample: dict[str, torch.Tensor],
    steps: int,
    start: int = 1,
    end: int | None = None,
) -> torch.Tensor:
    """As dflash.drafts: each draft follows the drafter's own draft before it, the first one the anchor."""
    markov = model.markov_head

    def follow(states: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        base, known = block_drafter.head_logits(model, states), anchors[:, None]
        for slot in range(states.shape[1]):
            since = 0 if markov.head_type == "rnn" else slot  # only rnn remembers more than a token
            bias = markov.block_bias(
                prev_token_ids=known[:, since:], hidden_states=states[:, since : slot + 1]
            )
            found = (base[:, slot] + bias[:, -1]).argmax(-1)
            known = torch.cat([known, block_drafts.target_ids(model, found)[:, None]], dim=1)
        return known[:, 1:]

    return block_drafts.proposed(model, sample, steps, start, end, FIRST, follow)
