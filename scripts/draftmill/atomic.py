"""Files appear under their final name whole, or not at all."""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from draftmill.errors import DraftmillError, damaged


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it is flushed to disk and renamed to `path`.

    On any exception the temporary file is removed and nothing changes under the final name.
    A full disk becomes a DraftmillError that names the file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        if is_full_disk(error):
            raise DraftmillError(
                f"{path}: no space left on the device while writing; nothing was left under this "
                f"name; free space in {path.parent} and start again."
            ) from error
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_full_disk(error: Exception) -> bool:
    """A full disk or quota; safetensors reports it by text alone, as "(os error 28)"."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    told = any(f"os error {number})" in str(error) for number in numbers)
    return told or getattr(error, "errno", None) in numbers


def fsync(path: Path) -> None:
    """Flushes a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: str | Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: object) -> None:
    """Writes sorted, indented JSON: the same value gives the same bytes."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def read_json(path: str | Path, fault: Callable = damaged) -> dict:
    """The object in a JSON file; the error that `fault` makes of path and reason where there is none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise fault(path, error) from None
    if not isinstance(found, dict):
        raise fault(path, f"a {type(found).__name__}, expected an object")
    return found


def sha256_of(path: str | Path) -> str:
    """The hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
