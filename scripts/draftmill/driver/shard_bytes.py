"""How many bytes a hidden-state shard takes, known before it is written."""

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from draftmill import shard_writer
from draftmill.dtype_policy import BYTES, DTYPES

PROBE_TOKENS = 8
PROBE_SAMPLES = 9


@dataclass(frozen=True)
class ShardBytes:
    """Bytes per token (states, ids, mask), per sample (page headers, column chunks, footer) and per file."""

    per_token: float
    per_sample: float
    per_shard: float

    def total(self, tokens: float, samples: float, shards: int) -> int:
        return round(tokens * self.per_token + samples * self.per_sample + shards * self.per_shard)


@cache
def shard_bytes(layers: tuple[int, ...], hidden: int, dtype: str) -> ShardBytes:
    """The bytes of a capture's shards; the overheads are measured by writing two tiny ones."""
    states = hidden * BYTES[dtype] * (len(layers) + 1)
    per_token = states + 4 + 1 / 8  # int32 id, one bit of mask
    with tempfile.TemporaryDirectory() as folder:
        one, many = (
            probe(Path(folder) / f"{samples}.parquet", samples, layers, hidden, dtype)
            for samples in (1, PROBE_SAMPLES)
        )
    step = (many - one) / (PROBE_SAMPLES - 1)
    return ShardBytes(per_token, step - PROBE_TOKENS * per_token, one - step)


def probe(path: Path, samples: int, layers: tuple[int, ...], hidden: int, dtype: str) -> int:
    """The size of a shard of zeros."""
    state = torch.zeros(PROBE_TOKENS, hidden, dtype=DTYPES[dtype])
    about = {"row": 1000, "turn": 1, "category": "category", "start": 100}
    record = {"settings": "x" * 2000}  # about what a job's record takes
    with shard_writer.new_shard(path, list(layers), hidden, dtype, record) as shard:
        for _ in range(samples):
            ids = list(range(PROBE_TOKENS))
            shard.append(about, ids, [1] * PROBE_TOKENS, [state] * (len(layers) + 1))
    return path.stat().st_size
