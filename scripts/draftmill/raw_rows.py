"""The raw rows of a source, as they stand in its file or data set, and the digest of a range of them.

A row is one line of a JSONL file (blank lines count, so that row numbers are line numbers), one row of a
Parquet file or of a data set, or one prompt of the stdlib list.
"""

import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from draftmill.errors import DraftmillError
from draftmill.stdlib_prompts import stdlib_prompts

HASH_BYTES = 16


def row_hash(row: bytes) -> bytes:
    return hashlib.blake2b(row, digest_size=HASH_BYTES).digest()


def range_digest(hashes: bytes) -> str:
    """The digest of consecutive rows: over their concatenated row hashes."""
    return hashlib.blake2b(hashes, digest_size=HASH_BYTES).hexdigest()


def open_lines(path: Path):
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def file_rows(path: Path, start: int = 0) -> Iterator[bytes]:
    """The rows of a JSONL or Parquet file from row `start` on, as bytes (JSON).

    Raises DraftmillError where the file is damaged or of no known type.
    """
    if path.suffix == ".parquet":
        yield from parquet_rows(path, start)
        return
    if path.suffixes[-1:] not in ([".jsonl"], [".gz"]) or ".jsonl" not in path.suffixes:
        raise DraftmillError(
            f"{path}: unknown file type; expected a name ending in .jsonl, .jsonl.gz or .parquet."
        )
    try:
        with open_lines(path) as file:
            for line in itertools.islice(file, start, None):
                yield line.rstrip(b"\r\n")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise unreadable(path, error) from None


def parquet_rows(path: Path, start: int) -> Iterator[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        yield from rows_of_groups(pq.ParquetFile(path), start)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> DraftmillError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return DraftmillError(f"{path}: cannot be read ({reason}); replace it by a whole file.")


def rows_of_groups(file, start: int) -> Iterator[bytes]:
    first = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if first + rows > start:
            for row in file.read_row_group(group).to_pylist()[max(0, start - first) :]:
                yield json.dumps(row, ensure_ascii=False, default=str).encode()
        first += rows


def hub_rows(source: dict, start: int) -> Iterator[bytes]:
    """Rows of a data set by id and revision, or of a folder written by save_to_disk."""
    import datasets

    try:
        if Path(source["id"]).is_dir():
            data = datasets.load_from_disk(source["id"])
            if isinstance(data, datasets.DatasetDict):
                data = data[source["split"]]
        else:
            data = datasets.load_dataset(
                source["id"],
                source.get("subset"),
                split=source["split"],
                revision=source["revision"],
            )
    except (OSError, KeyError, ValueError) as error:
        raise unreadable(Path(source["id"]), error) from None
    if len(data) != source["rows"]:
        raise DraftmillError(
            f"{source['id']}: split '{source['split']}' has {len(data)} rows, but the configuration "
            f"says rows: {source['rows']}; correct it."
        )
    for i in range(start, len(data)):
        yield json.dumps(data[i], ensure_ascii=False, default=str).encode()


def rows_of(source: dict, start: int, stop: int) -> list[bytes]:
    """Rows start..stop of a source of any kind, as bytes."""
    if source["kind"] == "stdlib":
        rows = (json.dumps({"prompt": p}).encode() for p in stdlib_prompts()[start:])
    elif source["kind"] == "file":
        rows = file_rows(Path(source["path"]), start)
    else:
        rows = hub_rows(source, start)
    return list(itertools.islice(rows, stop - start))
