"""The files of a drafter that others trained: a folder or a hub snapshot, read and never run."""

import pickle
from pathlib import Path

import torch
from huggingface_hub import snapshot_download

from draftmill import checkpoint_files
from draftmill.atomic import read_json, sha256_of
from draftmill.errors import DraftmillError, broken

CONFIG = "config.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
READ = ["*.json", "*.safetensors", PICKLE, "pytorch_model-*.bin"]


def folder_of(settings: dict) -> Path:
    """The drafter's folder: `path`, or the snapshot of `hub` at `revision`."""
    if settings["path"]:
        return Path(settings["path"])
    revision = settings["revision"]
    return Path(snapshot_download(settings["hub"], revision=revision, allow_patterns=READ))


def read_config(folder: Path) -> dict:
    """Its config.json. Raises DraftmillError where there is none."""
    return read_json(folder / CONFIG, broken)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold its weights: safetensors if there are any, else PyTorch's pickle.

    Raises DraftmillError where there are none, or where one that an index names is missing.
    """
    if has_safetensors(folder):
        names = checkpoint_files.weight_map(folder).values()
    elif (folder / PICKLE_INDEX).is_file():
        try:
            names = read_json(folder / PICKLE_INDEX, broken)["weight_map"].values()
        except (KeyError, AttributeError) as error:
            raise broken(folder / PICKLE_INDEX, f"holds no weight_map ({error})") from None
    elif (folder / PICKLE).is_file():
        names = [PICKLE]
    else:
        raise DraftmillError(
            f"{folder}: holds no weights, expected {checkpoint_files.WHOLE}, {PICKLE} or either in shards with "
            "an index; complete the download."
        )
    files = [folder / name for name in sorted(set(names))]
    for file in files:
        if not file.is_file():
            raise DraftmillError(
                f"{file}: is missing, but the index names it; complete the download."
            )
    return files


def has_safetensors(folder: Path) -> bool:
    return any((folder / n).is_file() for n in (checkpoint_files.INDEX, checkpoint_files.WHOLE))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """name -> tensor, on the CPU, in the dtypes of the files.

    Raises DraftmillError where a file is damaged, or a pickle holds anything but tensors.
    """
    files = weight_files(folder)
    if has_safetensors(folder):
        checkpoint_files.check_files(folder)
        return {n: checkpoint_files.read(folder, n) for n in checkpoint_files.weight_map(folder)}
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= unpickled(file)
    return found


def unpickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickle, of which no code is run."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise DraftmillError(
            f"{path}: holds Python objects beside tensors, whose code would run as it is read; convert the "
            "checkpoint to safetensors where you trust it."
        ) from None
    except (RuntimeError, OSError, EOFError) as error:
        raise broken(path, error) from None
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        raise broken(path, "no dictionary of tensors")
    return found


def digests(folder: Path) -> dict[str, str]:
    """file name -> SHA-256 of what is read of the drafter."""
    return {f.name: sha256_of(f) for f in [folder / CONFIG, *weight_files(folder)]}
