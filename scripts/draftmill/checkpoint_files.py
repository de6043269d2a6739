"""A checkpoint's safetensors files, read by index and headers only."""

import json
from collections import defaultdict
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from draftmill.atomic import read_json
from draftmill.errors import DraftmillError, broken

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
HEADER_LENGTH_BYTES = 8  # little-endian length of the JSON header (safetensors format)
HEADER_LIMIT = 100_000_000  # safetensors' own limit, in bytes


@lru_cache
def weight_map(folder: Path) -> dict[str, str]:
    """tensor name -> file name, as the index says, or of the one file where there is no index.

    Raises DraftmillError where the folder holds no safetensors checkpoint.
    """
    if (folder / INDEX).is_file():
        try:
            found = read_json(folder / INDEX, broken)["weight_map"]
        except KeyError as error:
            raise broken(folder / INDEX, f"lacks {error}") from None
        if not isinstance(found, dict) or not all(isinstance(f, str) for f in found.values()):
            raise broken(folder / INDEX, "its weight_map is no map from tensors to files")
        return found
    if (folder / WHOLE).is_file():
        return dict.fromkeys(header(folder / WHOLE), WHOLE)
    raise DraftmillError(
        f"{folder}: holds neither {INDEX} nor {WHOLE}; a target is read from safetensors files, so "
        "convert other formats first."
    )


@lru_cache(maxsize=256)
def header(path: Path) -> dict[str, dict]:
    """tensor name -> {"dtype", "shape", "data_offsets"}, without touching the tensors.

    Raises DraftmillError where the file is missing, damaged or shorter than its header says.
    """
    if not path.is_file():
        raise DraftmillError(
            f"{path}: is missing, but the checkpoint's index names it; complete the download."
        )
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        if not 2 <= length <= min(HEADER_LIMIT, size - HEADER_LENGTH_BYTES):
            raise broken(path, "no safetensors header")
        try:
            found = json.loads(file.read(length))
            found.pop("__metadata__", None)
            tensors = [(t["dtype"], t["shape"], t["data_offsets"]) for t in found.values()]
            end = max((offsets[1] for _, _, offsets in tensors), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise broken(path, f"no safetensors header: {error}") from None
    if size != HEADER_LENGTH_BYTES + length + end:
        raise broken(path, f"{size} bytes, but its header says {length + end + 8}; cut short?")
    return found


def entry(folder: Path, name: str) -> dict:
    """What the header of its file says of a tensor."""
    file = weight_map(folder)[name]
    found = header(folder / file)
    if name not in found:
        raise DraftmillError(
            f"{folder / file}: does not hold the tensor {name}, which {INDEX} places there; the index "
            "belongs to other files."
        )
    return found[name]


def check_files(folder: Path) -> None:
    """Every file of the index is there and whole, every tensor of the index in its file."""
    for name in weight_map(folder):
        entry(folder, name)


def read(folder: Path, name: str) -> torch.Tensor:
    """One tensor, in memory of its own; no other tensor of its file is touched."""
    entry(folder, name)
    path = folder / weight_map(folder)[name]
    try:
        with safe_open(path, "pt") as file:
            return file.get_tensor(name).clone()  # not a view of the mapped file
    except SafetensorError as error:
        raise broken(path, error) from None


def ranges(folder: Path, names: list[str]) -> dict[Path, list[tuple[int, int]]]:
    """file -> where the tensors' bytes stand in it, from and to."""
    wanted: dict[Path, list[tuple[int, int]]] = defaultdict(list)
    for name in names:
        path = folder / weight_map(folder)[name]
        start, end = entry(folder, name)["data_offsets"]
        first = data_start(path)
        wanted[path].append((first + start, first + end))
    return dict(wanted)


@lru_cache(maxsize=256)
def data_start(path: Path) -> int:
    """Where the first tensor of a file stands."""
    with open(path, "rb") as file:
        return HEADER_LENGTH_BYTES + int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
