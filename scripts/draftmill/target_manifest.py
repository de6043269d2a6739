"""The target's manifest.json: what every later stage reads of the target."""

from pathlib import Path

from draftmill.atomic import read_json
from draftmill.errors import DraftmillError


def read_manifest(path: str | Path) -> dict:
    """The target's manifest.json, its folders made absolute."""
    return located(read_json(path), Path(path).parent)


def located(manifest: dict, parent: Path) -> dict:
    """The manifest in `parent` with the folders of checkpoint and tokenizer made absolute."""
    source, parent = manifest["tokenizer_source"], parent.absolute()
    return manifest | {
        "checkpoint": str(parent / manifest["checkpoint"]),
        "tokenizer_source": source | {"folder": str(parent / source["folder"])},
    }


def length_limit(manifest: dict, max_length: int | None) -> int:
    """The longest sequence in tokens: the configured one, else the target's context."""
    context = manifest["context_length"]
    if context is None:
        if max_length is None:
            raise DraftmillError(
                "config: target.max_length is not set, and the target's config.json names no context length; "
                "set it."
            )
        return max_length
    if max_length is not None and max_length > context:
        raise DraftmillError(
            f"config: target.max_length is {max_length}, but the target's context is {context}; text past "
            "it means nothing."
        )
    return max_length or context
