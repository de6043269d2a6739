"""Sequences in batches of similar length, padded on the right: the target's forward passes.

Never packed: state-space and chunked-attention targets would see across sequences.
"""

from collections import defaultdict
from collections.abc import Iterator

import torch


def batches_of(
    rows: list[dict], batch_tokens: int, padding: str, border: int | None = None
) -> Iterator[list[dict]]:
    """Rows in batches of at most `batch_tokens`: of one length each where padding is "none", else
    sorted by length, so that little is padded.

    border: the target treats sequences up to this length otherwise than longer ones, so none is padded
    beyond it.
    """
    groups: dict[int, list[dict]] = defaultdict(list)
    for row in sorted(rows, key=lambda r: (len(r["input_ids"]), r["row"], r["turn"])):
        length = len(row["input_ids"])
        beyond = border is not None and length > border
        groups[length if padding == "none" else beyond].append(row)
    for group in groups.values():
        batch: list[dict] = []
        for row in group:  # lengths ascend, so the new row sets the padded length
            if batch and (len(batch) + 1) * len(row["input_ids"]) > batch_tokens:
                yield batch
                batch = []
            batch.append(row)
        yield batch


def batch_tensors(batch: list[dict], device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ids and mask [batch, tokens], padded on the right (safe for causal attention); no mask where
    nothing is padded."""
    longest = len(batch[-1]["input_ids"])
    ids = [r["input_ids"] + [0] * (longest - len(r["input_ids"])) for r in batch]
    mask = [[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in batch]
    padded = len(batch[0]["input_ids"]) < longest
    ids, mask = (torch.tensor(x, device=device) for x in (ids, mask))
    return ids, mask if padded else None
