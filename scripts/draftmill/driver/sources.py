"""What the driver must know of each source before the DAG exists: its shards and their digests.

Files are read once and remembered in .draftmill/index/, keyed by size, inode, mtime and ctime: a change
that puts the old mtime back still changes the ctime.
"""

import hashlib
import os
import zipfile
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from draftmill.atomic import atomic_path
from draftmill.errors import DraftmillError
from draftmill.raw_rows import HASH_BYTES, file_rows, range_digest, row_hash, rows_of

INDEX = Path(".draftmill") / "index"


def stat_key(path: Path) -> str:
    s = os.stat(path)
    return f"{s.st_size}-{s.st_ino}-{s.st_mtime_ns}-{s.st_ctime_ns}"


def remembered(path: Path, what: str, make) -> np.ndarray:
    """`make()`'s array for a file, from the index where the file has not changed since."""
    name = hashlib.sha256(f"{what}\0{path.resolve()}".encode()).hexdigest()[:24]
    entry = INDEX / f"{name}.npz"
    try:
        with np.load(entry) as saved:
            if str(saved["key"]) == stat_key(path):
                return saved["value"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        pass  # not there yet, or damaged: it is only a memory
    key, value = stat_key(path), make()
    with atomic_path(entry) as temporary, open(temporary, "wb") as file:
        np.savez(file, key=key, value=value)
    return value


def file_hashes(path: Path) -> np.ndarray:
    """The row hashes of a file, uint8 of shape [rows, HASH_BYTES]."""
    return hashes_at(path, stat_key(path))


@lru_cache(maxsize=64)
def hashes_at(path: Path, key: str) -> np.ndarray:
    """The row hashes of a file in one state of it, read once a process."""

    def make() -> np.ndarray:
        hashes = b"".join(map(row_hash, file_rows(path)))
        return np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)

    return remembered(path, "rows", make)


def file_digest(path: Path) -> str:
    """The SHA-256 of a whole file, remembered."""

    def make() -> np.ndarray:
        with open(path, "rb") as file:
            return np.frombuffer(hashlib.file_digest(file, "sha256").digest(), np.uint8)

    return remembered(path, "sha256", make).tobytes().hex()


@cache
def folder_digest(folder: Path) -> str:
    """A digest over the names and contents of a folder's files."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    text = "".join(f"{p.relative_to(folder)}\0{file_digest(p)}\n" for p in files)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def stdlib_hashes() -> np.ndarray:
    rows = rows_of({"kind": "stdlib"}, 0, 10**9)
    return np.frombuffer(b"".join(map(row_hash, rows)), np.uint8).reshape(-1, HASH_BYTES)


def row_ranges(name: str, source: dict) -> list[tuple[int, int]]:
    """The row range [start, stop) of each shard: fixed multiples of shard_size from the offset on.

    Raises DraftmillError for a missing or empty file and for an offset past its end.
    """
    if source["kind"] == "hub":
        total, where = source["rows"], source["id"]
    elif source["kind"] == "stdlib":
        total, where = len(stdlib_hashes()), "the stdlib list"
    else:
        path = Path(source["path"])
        if not path.is_file():
            raise DraftmillError(f"config: 'sources.{name}.path': {path} does not exist.")
        total, where = len(file_hashes(path)), path
        if total == 0:
            raise DraftmillError(f"{where}: has no rows; source '{name}' needs at least one.")
    end = total if source["limit"] is None else min(total, source["offset"] + source["limit"])
    if source["offset"] >= total:
        raise DraftmillError(
            f"config: 'sources.{name}.offset' is {source['offset']}, but {where} has {total} rows."
        )
    size = source["shard_size"]
    return [(s, min(s + size, end)) for s in range(source["offset"], end, size)]


def rows_digest(source: dict, start: int, stop: int) -> str:
    """What identifies the rows start..stop: their digest, or the data set's revision."""
    if source["kind"] == "hub":
        folder = Path(source["id"])
        return folder_digest(folder) if folder.is_dir() else source["revision"]
    stdlib = source["kind"] == "stdlib"
    hashes = stdlib_hashes() if stdlib else file_hashes(Path(source["path"]))
    return range_digest(hashes[start:stop].tobytes())
