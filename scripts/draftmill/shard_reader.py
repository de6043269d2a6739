"""Reads a hidden-state shard; a damaged or foreign file never passes."""

import json
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from draftmill import shard_layout
from draftmill.dtype_policy import BYTES, DTYPES, Ledger
from draftmill.errors import DraftmillError, damaged

# the integer type that carries a state's bits through numpy, which has no bfloat16
CARRIER = {2: np.int16, 4: np.int32}


class Shard:
    """An open shard.

    Raises DraftmillError where the file is damaged or its states are not of the declared dtype.
    """

    def __init__(self, path: str | Path, dtype: str):
        self.path = Path(path)
        if not self.path.is_file():
            raise DraftmillError(
                f"{path}: missing, though the manifest lists it; start Snakemake again to rebuild it."
            )
        shard_layout.check_seal(self.path)
        try:
            self.file = pq.ParquetFile(self.path, page_checksum_verification=True, pre_buffer=False)
            self.footer = json.loads(self.file.metadata.metadata[b"draftmill"])
        except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
            raise damaged(path, error) from None
        Ledger().expect(f"stored hidden states ({self.path})", self.footer["dtype"], dtype)
        version = self.footer["schema_version"]
        if version != shard_layout.SCHEMA_VERSION:
            raise damaged(path, f"schema version {version}, expected {shard_layout.SCHEMA_VERSION}")
        self.dtype = dtype
        self.hidden = self.footer["hidden_size"]
        self.samples: list[dict] = self.footer["samples"]
        if len(self.samples) != self.file.num_row_groups:
            found = f"{self.file.num_row_groups} row groups for {len(self.samples)} samples"
            raise damaged(path, found)

    @cached_property
    def layers(self) -> list[int]:
        return self.footer["layers"]["output_of"]

    @property
    def fingerprint(self) -> str:
        return self.footer["record"]["fingerprint"]

    def read(self, index: int, columns: list[str]) -> dict[str, torch.Tensor]:
        """The columns of sample `index`: input_ids int64 [tokens], loss_mask bool [tokens], states
        [tokens, hidden] in the declared dtype."""
        try:
            table = self.file.read_row_group(index, columns=columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise damaged(self.path, error) from None
        if table.num_rows != self.samples[index]["tokens"]:
            raise damaged(self.path, f"sample {index} does not have the tokens of the footer")
        return {name: self._tensor(table.column(name)) for name in columns}

    def _tensor(self, column: pa.ChunkedArray) -> torch.Tensor:
        array = column.combine_chunks()
        if not pa.types.is_fixed_size_binary(array.type):
            values = np.array(array.to_numpy(zero_copy_only=False))
            return torch.from_numpy(values if values.dtype == bool else values.astype(np.int64))
        itemsize = BYTES[self.dtype]
        flat = np.frombuffer(array.buffers()[1], CARRIER[itemsize])
        start = array.offset * self.hidden
        flat = flat[start : start + len(array) * self.hidden].reshape(len(array), self.hidden)
        return torch.from_numpy(flat.copy()).view(DTYPES[self.dtype])
