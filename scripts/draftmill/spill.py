"""Tensors put aside on disk until they are needed: states captured at early layers of a streamed pass."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from draftmill.atomic import is_full_disk
from draftmill.errors import DraftmillError


@dataclass(frozen=True)
class Spilled:
    offset: int
    shape: torch.Size
    dtype: torch.dtype


class Spill:
    """One unnamed file in `folder`; it vanishes with the process. Its pages are the system's cache, not the
    process's memory.

    Raises DraftmillError where the disk is full, and where it does not give back what was put there.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (lives as long as this)

    def put(self, tensor: torch.Tensor) -> Spilled:
        raw = tensor.detach().cpu().contiguous().view(torch.uint8).flatten()
        offset = self._file.tell()
        try:
            self._file.write(raw.numpy())
            self._file.flush()  # else a full disk shows only when the next tensor is put or read
        except OSError as error:
            if not is_full_disk(error):
                raise
            raise DraftmillError(
                f"{self._folder}: no space left on the device for the {raw.numel():,} bytes of a state that is put "
                "aside during a streamed pass; nothing was left there; free space and start again."
            ) from error
        return Spilled(offset, tensor.shape, tensor.dtype)

    def get(self, spilled: Spilled) -> torch.Tensor:
        """The tensor, on the CPU."""
        end = self._file.tell()
        found = torch.empty(spilled.shape, dtype=spilled.dtype)
        self._file.seek(spilled.offset)
        raw = found.view(torch.uint8).flatten()
        count = self._file.readinto(raw.numpy())
        self._file.seek(end)
        if count != raw.numel():
            raise DraftmillError(
                f"{self._folder}: of a state put aside there, {count:,} bytes came back, expected {raw.numel():,}; "
                "look at the disk and start again."
            )
        return found

    def close(self) -> None:
        self._file.close()
