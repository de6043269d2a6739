"""What one training pass predicts, in a form that an audit can read whatever the algorithm."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Predictions:
    """Drafts of one packed row, flattened over anchors and slots (DFlash) or over steps and rows (EAGLE-3).

    logits: fp32 [drafts, draft vocabulary]. targets: the target's logits for the same tokens, same shape.
    weights: fp32 [drafts], 0 where a draft carries no loss; the training loss is the sum of weights times losses.
    position: int64 [drafts], the place in the packed row of the token that is drafted; those without loss may
    lie outside. anchor: int64 [drafts], the first place whose state the draft must not see.
    """

    logits: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    position: torch.Tensor
    anchor: torch.Tensor
