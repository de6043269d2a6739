"""Writes a hidden-state shard, one sample at a time, whole or not at all."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from draftmill import shard_layout
from draftmill.atomic import atomic_path

PAGE_BYTES = 1 << 20
WRITE_BATCH = 16  # rows between pyarrow's checks of the page size


class ShardWriter:
    """Appends samples to an open shard; made by `new_shard`."""

    def __init__(self, writer: pq.ParquetWriter, schema: pa.Schema):
        self._writer = writer
        self._schema = schema
        self.samples: list[dict] = []

    def append(self, sample: dict, ids, mask, states: list[torch.Tensor]) -> None:
        """One row group.

        sample: what the footer says of it (row, turn, category, start).
        ids, mask: integers of length [tokens].
        states: tensors [tokens, hidden] on the CPU, one per state column, in the schema's order.
        """
        columns = [pa.array(ids, pa.int32()), pa.array(np.asarray(mask, bool))]
        for field, state in zip(list(self._schema)[2:], states, strict=True):
            if state.shape[0] != len(ids):
                raise ValueError(f"{state.shape[0]} states for {len(ids)} tokens")
            columns.append(fixed_binary(state, field.type))
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema), 1 << 30)
        self.samples.append(sample | {"tokens": len(ids)})


def fixed_binary(state: torch.Tensor, kind: pa.DataType) -> pa.Array:
    """A [tokens, hidden] tensor as fixed-size binaries, without a copy."""
    raw = state.contiguous().view(torch.uint8).numpy()
    if raw.shape[1] != kind.byte_width:
        raise ValueError(f"a state row has {raw.shape[1]} bytes, the column {kind.byte_width}")
    return pa.FixedSizeBinaryArray.from_buffers(kind, raw.shape[0], [None, pa.py_buffer(raw)])


@contextmanager
def new_shard(
    path: Path, layers: list[int], hidden: int, dtype: str, record: dict
) -> Iterator[ShardWriter]:
    """A shard that appears under `path` when the block ends well.

    `record` may be completed inside the block; it is written at its end.
    """
    schema = shard_layout.schema(layers, hidden, dtype)
    with atomic_path(path) as temporary:
        writer = pq.ParquetWriter(
            temporary,
            schema,
            use_dictionary=False,
            write_statistics=False,
            compression="none",
            write_page_checksum=True,
            data_page_size=PAGE_BYTES,
            write_batch_size=WRITE_BATCH,
        )
        with writer:  # closes the file on an error too; atomic_path then removes it
            shard = ShardWriter(writer, schema)
            yield shard
            footer = {
                "schema_version": shard_layout.SCHEMA_VERSION,
                "dtype": dtype,
                "hidden_size": hidden,
                "layers": {"output_of": layers},
                "last": "residual stream after the last decoder layer, before the final norm",
                "samples": shard.samples,
                "tokens": sum(s["tokens"] for s in shard.samples),
                "record": record,
                "complete": 1,
            }
            writer.add_key_value_metadata({"draftmill": json.dumps(footer, sort_keys=True)})
        shard_layout.seal(temporary)
