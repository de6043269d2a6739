"""Noise on the states that enter a drafter: in training only, on a copy, never on what targets come from."""

import torch


def noised(states: torch.Tensor, scale: float) -> torch.Tensor:
    """states [..., width] plus Gaussian noise of `scale` times each state's root mean square; the same tensor
    where scale is 0. The draw is torch's, whose random state is part of the resume state."""
    if scale == 0:
        return states
    size = states.float().square().mean(-1, keepdim=True).sqrt() * scale
    return (states.float() + torch.randn_like(states, dtype=torch.float32) * size).to(states.dtype)
