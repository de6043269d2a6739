"""A block drafter's training: its blocks, their targets from the target's own head, weights and loss.

A draft of the token at place p is trained against the target's logits at p - 1, those for that token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from speculators.losses import resolve_loss_config
from speculators.losses.eager import ce_loss
from speculators.losses.utils import dflash_loss_decay, dpace_loss_decay
from speculators.models.dflash import DFlashDraftModel
from torch import nn

from draftmill import anchor_blocks, block_drafter
from draftmill.input_noise import noised
from draftmill.predictions import Predictions
from draftmill.target_head import TargetHead

GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}  # block -> decay of the loss, arXiv 2602.06036
DPACE_ALPHA = 0.5  # speculators' default


@dataclass(frozen=True)
class Blocks:
    """The blocks of one packed row, as far as every block drafter has them.

    anchors: int64 [anchors]. places: int64 [anchors, drafts], of the tokens that are drafted; those without
    loss may lie outside. known: ids of the tokens before them, same shape. states: [anchors, drafts, hidden],
    what the drafter's head reads. targets: fp32 [anchors, drafts, draft vocabulary], the target's logits.
    scored: bool [anchors, drafts].
    """

    anchors: torch.Tensor
    places: torch.Tensor
    known: torch.Tensor
    states: torch.Tensor
    targets: torch.Tensor
    scored: torch.Tensor


class WithTargets(nn.Module):
    """A drafter whose training targets come from the target's own head."""

    first: int  # the first slot that drafts

    def __init__(self, drafter: DFlashDraftModel, head: TargetHead, settings: dict):
        super().__init__()
        self.drafter = drafter
        object.__setattr__(self, "head", head)  # not a submodule: never trained, saved or cast
        training = settings["training"]
        self.noise, self.block = training["noise"], settings["block_size"]
        self.count = self.block - self.first  # tokens that a block drafts
        ((self.loss, _),) = resolve_loss_config(training["loss"], "eager").values()
        self.dpace = training["position_weights"] == "dpace"
        self.gamma = training["gamma"] or gamma_of(self.block)

    def blocks(self, batch: dict[str, torch.Tensor]) -> Blocks:
        """The blocks of a packed batch (see packing.pack), those of `batch["anchors"]`."""
        row = {name: value[0] for name, value in batch.items()}
        anchors = row["anchors"].nonzero().flatten()
        if not len(anchors):  # no answer in this pack: a block without loss keeps the shapes
            anchors = anchors.new_zeros(1)
        places = anchor_blocks.block_positions(anchors, self.count + 1)[:, 1:]
        # a draft's target: the logits at the place before it
        before = (places - 1).clamp(max=len(row["input_ids"]) - 1)
        with torch.no_grad():
            once, where = torch.unique(before, return_inverse=True)
            targets = self.head(row["last"][once][None])[0].float()[where]
        states = block_drafter.states(
            self.drafter,
            noised(row["aux"], self.noise) if self.training else row["aux"],
            row["input_ids"],
            row["document_ids"],
            row["position_ids"],
            anchors,
            self.block,
        )
        scored = anchor_blocks.supervised(
            anchors, self.count + 1, row["loss_mask"], row["document_ids"]
        )[:, 1:]
        known = row["input_ids"][before]
        return Blocks(anchors, places, known, states[:, self.first :], targets, scored)

    def logits(self, blocks: Blocks) -> torch.Tensor:
        """[anchors, drafts, draft vocabulary], in the dtype of the compute."""
        return block_drafter.head_logits(self.drafter, blocks.states)

    def predict(self, batch: dict[str, torch.Tensor]) -> Predictions:
        """The drafts of a packed batch (see packing.pack)."""
        return self.predictions(self.blocks(batch))

    def predictions(self, blocks: Blocks) -> Predictions:
        # losses, accuracies and their reductions in fp32, whatever the weights are
        logits = self.logits(blocks).float().flatten(0, 1)
        targets = blocks.targets.flatten(0, 1)
        return Predictions(
            logits=logits,
            targets=targets,
            weights=self.weights(logits, targets, blocks.scored),
            position=blocks.places.flatten(),
            anchor=blocks.anchors.repeat_interleave(self.count),
        )

    def weights(
        self, logits: torch.Tensor, targets: torch.Tensor, scored: torch.Tensor
    ) -> torch.Tensor:
        """fp32 [drafts]: how each draft counts, 0 where `scored` [anchors, drafts] is false.

        As speculators has it: the position's weight over the number of scored drafts.
        """
        # D-PACE's weights grow with the drafter's confidence: as a measure over time, fixed ones are needed
        if (
            self.dpace and self.training
        ):  # its confidence is that in the target's choice, whatever the loss
            losses = ce_loss(logits.detach()[None], targets[None])
            found = dpace_loss_decay(None, scored, self.count, DPACE_ALPHA, losses)[0]
        else:
            found = (self.decay(scored) * scored).flatten()
        return found.float() / (scored.sum() + 1e-5)

    def decay(self, scored: torch.Tensor) -> torch.Tensor:
        """The exponential weight of each draft of a block, [anchors, drafts]; 1 for the first."""
        order = torch.arange(self.count, device=scored.device).expand(scored.shape)
        return dflash_loss_decay(order, self.gamma, sample_from_anchor=True)

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
        """Loss (fp32 scalar) and metrics of a packed batch."""
        blocks = self.blocks(batch)
        found = self.predictions(blocks)
        losses = self.loss(found.logits[None], found.targets[None])[0]
        loss = (losses * found.weights).sum() + self.head_loss(blocks, found)
        return loss, self.metrics(blocks, found) | {"scored": blocks.scored.sum()}

    def head_loss(self, blocks: Blocks, found: Predictions) -> torch.Tensor | float:
        """What the heads of other block drafters add to the loss of the drafts."""
        return 0.0

    def chosen(self, blocks: Blocks, found: Predictions) -> torch.Tensor:
        """int64 [drafts]: the draft vocabulary's ids that would be drafted after the text's own tokens."""
        return found.logits.argmax(-1)

    @torch.no_grad()
    def metrics(self, blocks: Blocks, found: Predictions) -> dict[str, torch.Tensor]:
        """full_acc_k: blocks in which the drafts 0 to k are all the target's choice, of those that hold k."""
        right = self.chosen(blocks, found) == found.targets.argmax(-1)
        right = (right.view_as(blocks.scored) & blocks.scored).cumprod(-1)
        metrics = {}
        for k in range(self.count):
            metrics[f"full_acc_{k}_sum"] = right[:, k].sum()
            metrics[f"full_acc_{k}_total"] = blocks.scored[:, k].sum()
        return metrics


def gamma_of(block: int) -> float:
    """The published decay for this block; between and beyond the published blocks, in proportion."""
    if block in GAMMAS:
        return GAMMAS[block]
    return block * GAMMAS[16] / 16


def prepared(settings: dict) -> Callable[[dict, str], dict]:
    """What makes a sample what DFlash sees: (sample, draw) -> the sample, with the anchors of this draw."""

    def prepare(sample: dict[str, torch.Tensor], draw: str) -> dict[str, torch.Tensor]:
        count = settings["training"]["anchors"]
        positions = torch.arange(len(sample["input_ids"]))
        anchors = anchor_blocks.drawn(sample["loss_mask"], count, draw)
        return sample | {"position_ids": positions, "anchors": anchors}

    return prepare


def length(tokens: int) -> int:
    """Rows of a prepared sample."""
    return tokens
