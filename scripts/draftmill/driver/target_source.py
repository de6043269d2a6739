"""What identifies the target's files, without loading them."""

import hashlib
from pathlib import Path

import numpy as np

from draftmill.atomic import read_json
from draftmill.driver.sources import file_digest, remembered
from draftmill.errors import DraftmillError, broken
from draftmill.target_location import package_file

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
WHOLE_BYTES = 4 << 30  # files are hashed whole up to this total; above, headers and samples
SAMPLES = 16
SAMPLE_BYTES = 1 << 20


def digest(target: dict) -> str:
    """A digest of the target's files: whole contents up to 4 GiB, else sizes, headers and samples.

    Raises DraftmillError where they are missing.
    """
    if target["hub"]:
        return target["revision"]
    if target["package"]:
        return file_digest(package_file(target["package"], target["gguf"]))[:32]
    folder = Path(target["path"])
    if not (folder / "config.json").is_file():
        raise DraftmillError(f"config: 'target.path': {folder} holds no config.json.")
    check_weights(folder)
    return files_digest(sorted(p for p in folder.iterdir() if p.is_file()))


def files_digest(files: list[Path]) -> str:
    """A digest of files by name: whole contents up to 4 GiB in all, else sizes, headers and samples."""
    whole = sum(p.stat().st_size for p in files) <= WHOLE_BYTES
    parts = (f"{p.name}\0{file_digest(p) if whole else sampled_digest(p)}\n" for p in files)
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:32]


def check_weights(folder: Path) -> None:
    """Refuses a folder without the safetensors files that it should hold, before anything is planned."""
    if (folder / INDEX).is_file():
        files = read_json(folder / INDEX, broken).get("weight_map")
        named = {str(name) for name in files.values()} if isinstance(files, dict) else set()
        for name in sorted(named):
            if not (folder / name).is_file():
                raise DraftmillError(
                    f"{folder / name}: is missing, but {INDEX} names it; complete the download."
                )
    elif not (folder / WHOLE).is_file():
        raise DraftmillError(
            f"{folder}: holds neither {INDEX} nor {WHOLE}; a target is read from safetensors files, so "
            "convert other formats first."
        )


def layer_count(target: dict) -> int | None:
    """The target's number of decoder layers, from its config.json, a copy of it or its GGUF header; None where
    none is at hand or says it so: the stages check it again."""
    if target["package"]:
        path = package_file(target["package"], target["gguf"])
        return int(remembered(path, "layers", lambda: gguf_layers(path))[0])
    own = Path(target["path"], "config.json") if target["path"] else None
    copy = Path(target["config"]) if target["config"] else None
    path = next((p for p in (own, copy) if p and p.is_file()), None)
    if path is None:
        return None
    found = read_json(path, broken)
    text = found.get("text_config")
    count = (text if isinstance(text, dict) else found).get("num_hidden_layers")
    return count if type(count) is int else None


def weight_bytes(target: dict) -> int | None:
    """Bytes of the target's safetensors files; None where they are not on this machine or are yet to be made."""
    folder = Path(target["path"]) if target["path"] else None
    if target["hub"]:
        from huggingface_hub import try_to_load_from_cache  # only hub targets wait for the import

        cached = try_to_load_from_cache(target["hub"], "config.json", revision=target["revision"])
        folder = Path(cached).parent if isinstance(cached, str) else None
    if folder is None:
        return None
    files = [p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated")]
    return sum(p.stat().st_size for p in files) or None


def gguf_layers(path: Path) -> np.ndarray:
    from gguf import GGUFReader  # slow to import, and rarely needed

    fields = GGUFReader(path).fields
    architecture = fields["general.architecture"].contents()
    return np.array([fields[f"{architecture}.block_count"].contents()])


def sampled_digest(path: Path) -> str:
    """A digest of a large file: its size and 16 blocks of 1 MiB spread over it, the first included."""
    size = path.stat().st_size
    if size <= SAMPLES * SAMPLE_BYTES:
        return file_digest(path)
    found = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for i in range(SAMPLES):
            file.seek(i * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()
