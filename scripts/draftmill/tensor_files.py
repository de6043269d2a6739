"""safetensors files that carry a record and a checksum, with the same bytes for the same content.

safetensors writes its metadata in a random order, so there is exactly one entry: "draftmill", a JSON text.
It has no checksum of its own either, so the record holds one over the tensors.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draftmill.atomic import atomic_path
from draftmill.errors import damaged


def write(path: str | Path, tensors: dict[str, torch.Tensor], record: dict) -> None:
    tensors = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    text = json.dumps(record | {"tensors_sha256": digest(tensors)}, sort_keys=True)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, {"draftmill": text})


def read(path: str | Path) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors and the record.

    Raises DraftmillError where the file is damaged or was not written by this project.
    """
    try:
        with safe_open(path, "pt") as file:
            record = json.loads((file.metadata() or {})["draftmill"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise damaged(path, error) from None
    if record.pop("tensors_sha256", None) != digest(tensors):
        raise damaged(path, "its tensors do not match their checksum")
    return tensors, record


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """The SHA-256 over names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()
