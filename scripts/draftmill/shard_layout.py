"""What a hidden-state shard is.

A standard Parquet file that any reader opens: a row is a token, a row group is a sample, and each layer is
one FIXED_LEN_BYTE_ARRAY column of hidden * itemsize bytes (Arrow and Parquet have no bfloat16), PLAIN,
uncompressed, every page with its CRC. The footer says what the states are. Parquet itself does not protect
its footer, so 40 bytes stand between the last page and the footer, where no reader looks: a mark and
the SHA-256 of the footer.
"""

import hashlib
import os
import struct
from pathlib import Path

import pyarrow as pa

from draftmill.dtype_policy import BYTES
from draftmill.errors import DraftmillError

SCHEMA_VERSION = "1"
LAST = "last"  # the residual stream after the last decoder layer, before the final norm
MAGIC = b"PAR1"
SEAL_MARK = b"DMSEAL01"
SEAL_BYTES = len(SEAL_MARK) + 32
TAIL = struct.Struct("<I4s")  # footer length, magic


def column_of(layer: int) -> str:
    """The column of a decoder layer's output, counted from 0."""
    return f"output_of_{layer}"


def schema(layers: list[int], hidden: int, dtype: str) -> pa.Schema:
    width = hidden * BYTES[dtype]
    states = [column_of(layer) for layer in layers] + [LAST]
    fields = [("input_ids", pa.int32()), ("loss_mask", pa.bool_())]
    fields += [(name, pa.binary(width)) for name in states]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])


def footer_of(path: Path) -> tuple[int, bytes]:
    """Byte offset and bytes of a Parquet footer (its length and magic not included).

    Raises DraftmillError where the file is no whole Parquet file.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(len(MAGIC))
        file.seek(max(0, size - TAIL.size))
        tail = file.read(TAIL.size)
        length, magic = TAIL.unpack(tail) if len(tail) == TAIL.size else (0, b"")
        start = size - TAIL.size - length
        if head != MAGIC or magic != MAGIC or start < len(MAGIC):
            raise DraftmillError(
                f"{path}: truncated or no Parquet file ({size} bytes); delete it and start Snakemake "
                "again to rebuild it."
            )
        file.seek(start)
        return start, file.read(length)


def seal(path: Path) -> None:
    """Puts the seal between the pages and the footer of a finished Parquet file."""
    start, footer = footer_of(path)
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(SEAL_MARK + hashlib.sha256(footer).digest() + footer)
        file.write(TAIL.pack(len(footer), MAGIC))


def check_seal(path: Path) -> None:
    """Raises DraftmillError where the footer is not the one that was written."""
    start, footer = footer_of(path)
    with open(path, "rb") as file:
        file.seek(max(0, start - SEAL_BYTES))
        found = file.read(SEAL_BYTES)
    if found != SEAL_MARK + hashlib.sha256(footer).digest():
        raise DraftmillError(
            f"{path}: the footer does not match its checksum, so the file was damaged or rewritten; "
            "delete it and start Snakemake again to rebuild it."
        )
