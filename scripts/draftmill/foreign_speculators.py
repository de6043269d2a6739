"""Drafters of others that are in speculators' own format already."""

from pathlib import Path

from speculators import SpeculatorModelConfig
from transformers import LlamaConfig, Qwen3Config

from draftmill import foreign_files
from draftmill.errors import DraftmillError
from draftmill.foreign_drafter import DESCRIPTIONS, decoder, refuse_unknown, refuse_values

MARK = "speculators_model_type"
LAYERS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
DEFAULT_THETA = 10_000.0  # of both classes
OF_THE_TARGET = ("verifier_norm.weight", "verifier_lm_head.weight")  # copies, used in training only


def format_of(folder: Path, other: str) -> str:
    """The format of a drafter's folder: speculators', or the `other` one that its algorithm was published in."""
    return "speculators" if MARK in foreign_files.read_config(folder) else other


def own_fields(
    kind: type[SpeculatorModelConfig], source: dict, where: Path
) -> tuple[dict, list[str]]:
    """The drafter's configuration as keyword arguments of `kind`, and remarks.

    transformer_layer_config is made; speculators_config is left to the caller. Raises DraftmillError for
    what would be lost.
    """
    expected = kind.model_fields[MARK].default
    if source[MARK] != expected:
        raise DraftmillError(
            f"{where}: {MARK} is {source[MARK]!r}, but the drafter's algorithm in the configuration is "
            f"{expected}; other algorithms cannot be imported."
        )
    fields = set(kind.model_fields)
    refuse_unknown(source, fields | DESCRIPTIONS | set(kind.__class_vars__), where)
    layers = source.get("transformer_layer_config")
    if not isinstance(layers, dict) or layers.get("model_type") not in LAYERS:
        raise DraftmillError(
            f"{where}: transformer_layer_config names no model_type of {', '.join(LAYERS)}; its decoder layers "
            "are unknown."
        )
    refuse_values(source, {"target_hidden_size": (layers.get("hidden_size"),)}, where)
    windows = set()
    if (
        layers["model_type"] == "llama"
    ):  # which has no windows; create_transformer_layer_config writes the keys
        windows = {"sliding_window", "use_sliding_window", "layer_types", "max_window_layers"}
        refuse_windows(layers, where)
    made, remarks = decoder(LAYERS[layers["model_type"]], layers, windows, DEFAULT_THETA, where)
    verifier = (source.get("speculators_config") or {}).get("verifier") or {}
    remarks.append(f"made for {verifier.get('name_or_path')}")
    kept = fields - {MARK, "speculators_config", "speculators_version", "architectures"}
    given = {k: source[k] for k in kept if k in source}
    return given | {"transformer_layer_config": made}, remarks


def refuse_windows(source: dict, where: Path) -> None:
    """Refuses sliding windows in layers of Llama's kind, which would be read as full attention."""
    kinds = set(source.get("layer_types") or ["full_attention"])
    if source.get("use_sliding_window") or kinds != {"full_attention"}:
        raise DraftmillError(
            f"{where}: its layers are {', '.join(sorted(kinds))} with use_sliding_window "
            f"{source.get('use_sliding_window')}, expected full attention in every layer of an EAGLE-3 drafter; "
            "it cannot be imported."
        )


def proposed_tokens(source: dict, default: int) -> int:
    """Tokens that the checkpoint itself proposes per step."""
    methods = (source.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens") or default
