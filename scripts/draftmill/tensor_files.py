"""safetensors files that carry a record, with the same bytes for the same content.

safetensors writes its metadata in a random order, so there is exactly one entry: "draftmill", a JSON text.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draftmill.atomic import atomic_path
from draftmill.errors import DraftmillError


def write(path: str | Path, tensors: dict[str, torch.Tensor], record: dict) -> None:
    tensors = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, {"draftmill": json.dumps(record, sort_keys=True)})


def read(path: str | Path) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors and the record."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if "draftmill" not in metadata:
            raise DraftmillError(f"{path}: carries no record, so it is not a file of this project.")
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    return tensors, json.loads(metadata["draftmill"])
