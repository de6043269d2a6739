"""Tensors put aside on disk until they are needed: states captured at early layers of a streamed pass."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Spilled:
    offset: int
    shape: torch.Size
    dtype: torch.dtype


class Spill:
    """One unnamed file in `folder`; it vanishes with the process. Its pages are the system's cache, not the
    process's memory."""

    def __init__(self, folder: Path):
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (lives as long as this)

    def put(self, tensor: torch.Tensor) -> Spilled:
        raw = tensor.detach().cpu().contiguous().view(torch.uint8).flatten()
        offset = self._file.tell()
        self._file.write(raw.numpy())
        return Spilled(offset, tensor.shape, tensor.dtype)

    def get(self, spilled: Spilled) -> torch.Tensor:
        """The tensor, on the CPU."""
        end = self._file.tell()
        found = torch.empty(spilled.shape, dtype=spilled.dtype)
        self._file.seek(spilled.offset)
        self._file.readinto(found.view(torch.uint8).flatten().numpy())
        self._file.seek(end)
        return found

    def close(self) -> None:
        self._file.close()
