"""A decoder layer written out with plain tensor operations, in float32: what drafters are compared with."""

import torch
from torch.nn import functional

from foreign_checkpoints import HEADS


class Weights:
    """Tensors of a checkpoint as it was published, in float32."""

    def __init__(self, tensors: dict[str, torch.Tensor], epsilon: float, queries: int = HEADS):
        self.tensors = {k: v.float() for k, v in tensors.items()}
        self.epsilon, self.queries = epsilon, queries

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(
            x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        )

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return (
            x
            * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
            * self.tensors[f"{name}.weight"]
        )

    def mlp(self, name: str, x: torch.Tensor, activation=functional.silu) -> torch.Tensor:
        gate = activation(self.linear(f"{name}.gate_proj", x))
        return self.linear(f"{name}.down_proj", gate * self.linear(f"{name}.up_proj", x))

    def heads(self, name: str, x: torch.Tensor, count: int) -> torch.Tensor:
        """[tokens, inputs] -> [heads, tokens, head size], each of the shared heads repeated for its group."""
        found = self.linear(name, x).view(len(x), count, -1).transpose(0, 1)
        return found.repeat_interleave(self.queries // count, dim=0)


def turned(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of [heads, tokens, head size]; angles: cos and sin [tokens, head size]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def attention(q, k, v, visible: torch.Tensor) -> torch.Tensor:
    """[heads, queries, size] and [heads, keys, size] -> [queries, heads * size]; visible: bool [queries, keys]."""
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).reshape(q.shape[1], -1)
