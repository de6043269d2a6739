"""Which files make a tokenizer and what they hash to, without loading anything."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from draftmill.atomic import read_json, sha256_of

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
)
SUFFIXES = (".model", ".tiktoken")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def tokenizer_files(folder: str | Path, code: bool) -> list[Path]:
    """The tokenizer's files that there are, sorted; with `code` every Python file, since one that runs may
    import any other. The chat template has a digest of its own."""
    files = [p for p in Path(folder).iterdir() if p.name in NAMES or p.suffix in SUFFIXES]
    files += Path(folder).rglob("*.py") if code else []
    return sorted(p for p in files if p.is_file())


def tokenizer_digest(folder: str | Path, code: bool) -> str:
    """16 hexadecimal digits over the names and contents of the tokenizer's files."""
    return combined(folder, tokenizer_files(folder, code))[:16]


def folder_digest(folder: str | Path) -> str:
    """A digest over everything in a tokenizer's folder but weights and hidden files: own code may read any
    of it, and chat template and config.json matter too."""
    found = (p for p in Path(folder).rglob("*") if p.is_file() and p.suffix not in WEIGHTS)
    visible = (p for p in found if not any(x[0] == "." for x in p.relative_to(folder).parts))
    return combined(folder, sorted(visible))[:32]


def combined(folder: str | Path, files: Iterable[Path]) -> str:
    lines = (f"{p.relative_to(folder).as_posix()}\0{sha256_of(p)}\n" for p in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def own_code(folder: str | Path) -> list[str]:
    """The classes that tokenizer_config.json maps AutoTokenizer to: the tokenizer's own Python code."""
    path = Path(folder) / "tokenizer_config.json"
    found = read_json(path).get("auto_map", []) if path.is_file() else []
    found = found.get("AutoTokenizer", []) if isinstance(found, dict) else found
    return [name for name in ([found] if isinstance(found, str) else found) if name]


def is_converted(folder: str | Path, trust_remote_code: bool) -> bool:
    """Whether transformers converts the tokenizer: no tokenizer.json, and no code of its own that runs."""
    own = trust_remote_code and own_code(folder)
    return not own and not (Path(folder) / "tokenizer.json").is_file()
