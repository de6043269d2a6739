"""Samples side by side in one row, for training; no sample sees another."""

import itertools
import random
from collections.abc import Iterator

import torch

BLOCK = 128  # of flex attention's masks
LOOKAHEAD = 64  # samples considered for one pack


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of samples in an epoch: a function of seed and epoch alone, so that it resumes."""
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def packs(order: list[int], lengths: list[int], limit: int) -> Iterator[list[int]]:
    """Samples in packs of at most `limit` tokens, each sample once.

    A pack takes the next sample of `order` and then whatever fits among the LOOKAHEAD after it. A sample
    longer than the limit gets a pack of its own and is cut there.
    """
    coming = iter(order)
    window = list(itertools.islice(coming, LOOKAHEAD))
    while window:
        pack, left, used = [], [], 0
        for index in window:
            length = min(lengths[index], limit)
            if used + length <= limit:
                pack.append(index)
                used += length
            else:
                left.append(index)
        window = left + list(itertools.islice(coming, len(pack)))
        yield pack


def pack(samples: list[dict[str, torch.Tensor]], limit: int) -> dict[str, torch.Tensor]:
    """Concatenates shifted samples and pads them to one size: every tensor [1, size, ...].

    size: `limit` rounded up to whole blocks of flex attention's masks.

    document_ids, int64, number the samples; padding is document -1, which no loss and no other token sees.
    One shape for all batches: kernels compile once, and the allocator reuses its blocks.
    """
    samples = [{k: v[:limit] for k, v in sample.items()} for sample in samples]
    numbers = [torch.full_like(s["position_ids"], i) for i, s in enumerate(samples)]
    samples = [s | {"document_ids": n} for s, n in zip(samples, numbers, strict=True)]
    batch = {k: torch.cat([s[k] for s in samples]) for k in samples[0]}
    missing = -(-limit // BLOCK) * BLOCK - len(batch["input_ids"])
    return {
        k: torch.cat([v, v.new_full((missing, *v.shape[1:]), -1 if k == "document_ids" else 0)])[
            None
        ]
        for k, v in batch.items()
    }
