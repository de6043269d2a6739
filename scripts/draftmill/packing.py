"""Samples side by side in one row, for training; no sample sees another."""

import random
from collections.abc import Iterator

import torch


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of samples in an epoch: a function of seed and epoch alone, so that it resumes."""
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def packs(order: list[int], lengths: list[int], limit: int) -> Iterator[list[int]]:
    """Consecutive samples of `order` in packs of at most `limit` tokens.

    A sample longer than the limit gets a pack of its own and is cut there.
    """
    pack: list[int] = []
    used = 0
    for index in order:
        length = min(lengths[index], limit)
        if pack and used + length > limit:
            yield pack
            pack, used = [], 0
        pack.append(index)
        used += length
    if pack:
        yield pack


def pack(samples: list[dict[str, torch.Tensor]], limit: int) -> dict[str, torch.Tensor]:
    """Concatenates shifted samples: every tensor [1, tokens, ...], with document_ids int64."""
    samples = [{k: v[:limit] for k, v in sample.items()} for sample in samples]
    batch = {k: torch.cat([s[k] for s in samples])[None] for k in samples[0]}
    numbers = [torch.full_like(s["position_ids"], i) for i, s in enumerate(samples)]
    return batch | {"document_ids": torch.cat(numbers)[None]}
