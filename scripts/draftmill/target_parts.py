"""Embedding, final norm and lm_head of a checkpoint: found by index and headers, read alone.

Two tensors of a 1T-parameter checkpoint are read without touching the rest.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from draftmill import checkpoint_files
from draftmill.checkpoint_names import Conversion
from draftmill.errors import DraftmillError
from draftmill.target_config import tie_flags
from draftmill.target_structure import final_norm, output_head, path_of

PLAIN = ("BF16", "F16", "F32")  # safetensors' names of what no quantiser has packed


@dataclass(frozen=True)
class Parts:
    """Names on disk. head: parameter ("lm_head.weight", "norm.bias", ...) -> tensor name."""

    head: dict[str, str]
    embedding: str
    tied: bool  # lm_head is the embedding


def find(folder: Path, model: nn.Module, conversion: Conversion) -> Parts:
    """The names on disk of what the head needs, each cross-checked by shape.

    model, conversion: on the meta device, without a quantiser. Raises DraftmillError where a tensor is missing or
    has another shape, and where the tied flag contradicts the disk.
    """
    embedding = f"{path_of(model, model.get_input_embeddings())}.weight"
    modules = {"lm_head": output_head(model), "norm": final_norm(model)}
    wanted = {
        f"{role}.{name}": f"{path_of(model, module)}.{name}"
        for role, module in modules.items()
        for name, _ in module.named_parameters()
    }
    on_disk = sources_of({embedding, *wanted.values()}, folder, conversion)
    tied = wanted["lm_head.weight"] in getattr(model, "all_tied_weights_keys", {})
    if embedding not in on_disk:
        raise DraftmillError(f"{folder}: holds no input embedding ({embedding}); complete it.")
    own_head, flags = on_disk.get(wanted["lm_head.weight"]), tie_flags(folder)
    if own_head is None:
        # flags that contradict each other leave one reading where there is no other head
        if not tied or (flags and True not in flags):
            raise DraftmillError(
                f"{folder}: holds no {wanted['lm_head.weight']}, and config.json says that it is not tied "
                f"to the embedding (tie_word_embeddings: {said(flags)}); some engines would make it random; "
                "complete the checkpoint or mend the flag."
            )
        on_disk[wanted["lm_head.weight"]] = on_disk[embedding]
    elif True in flags and own_head != on_disk[embedding]:
        check_equal(folder, own_head, on_disk[embedding], said(flags))
    parts = Parts(
        {role: on_disk.get(name) for role, name in wanted.items()}, on_disk[embedding], tied
    )
    shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
    for role, name in {**wanted, "embed_tokens.weight": embedding}.items():
        source = parts.head.get(role, parts.embedding)
        if source is None:
            raise DraftmillError(f"{folder}: holds no {name}; it would be random; complete it.")
        entry = checkpoint_files.entry(folder, source)
        if tuple(entry["shape"]) != tuple(shapes[name]):
            raise DraftmillError(
                f"{folder}: {source} has shape {tuple(entry['shape'])}, but config.json makes {name} "
                f"{tuple(shapes[name])}; the weights belong to another configuration."
            )
        if entry["dtype"] not in PLAIN:
            raise DraftmillError(
                f"{folder}: {source} is stored as {entry['dtype']}, expected one of {', '.join(PLAIN)}; a "
                "quantised embedding, norm or head is not supported, so take a checkpoint that leaves them as "
                "they were."
            )
    return parts


def sources_of(wanted: set[str], folder: Path, conversion: Conversion) -> dict[str, str]:
    """parameter -> tensor name, for the wanted ones that are on disk under one name each."""
    found: dict[str, str] = {}
    for name in conversion.unnumbered(checkpoint_files.weight_map(folder)):
        target, pattern = conversion.target_of(name)
        if target.startswith(tuple(f"{weight}_" for weight in wanted)):
            raise DraftmillError(
                f"{folder}: {name} belongs to a packed weight; a quantised embedding, norm or head is not "
                "supported, so take a checkpoint that leaves them as they were."
            )
        if target not in wanted:
            continue
        if pattern is not None or target in found:
            raise DraftmillError(
                f"{folder}: {target} is made of several tensors or by a conversion ({name}), which is not "
                "supported for embedding, norm and head."
            )
        found[target] = name
    return found


def said(flags: list[bool]) -> str:
    """The tied flags as JSON has them, the top one first."""
    return " and nested ".join(str(flag).lower() for flag in flags) or "absent"


def check_equal(folder: Path, head: str, embedding: str, flags: str) -> None:
    """Refuses a tied flag beside a head of its own on disk: engines disagree on which one counts."""
    first, second = (checkpoint_files.read(folder, name) for name in (head, embedding))
    if first.shape != second.shape or not torch.equal(first, second):
        raise DraftmillError(
            f"{folder}: config.json says that lm_head is tied to the embedding (tie_word_embeddings: {flags}), "
            f"but {head} differs from {embedding} on disk; some engines would use one, some the other; mend "
            "the flag or the file."
        )


def read(folder: Path, parts: Parts, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """embed_tokens.weight, norm.* and lm_head.* in the given dtype."""
    names = {"embed_tokens.weight": parts.embedding} | parts.head
    return {role: checkpoint_files.read(folder, name).to(dtype) for role, name in names.items()}
