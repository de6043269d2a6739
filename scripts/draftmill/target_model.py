"""The target as transformers knows it: its text configuration, its decoder, where its answers end."""

import json
from pathlib import Path

import torch
import transformers
from torch import nn

from draftmill.atomic import read_json, sha256_of
from draftmill.devices import best_device
from draftmill.dtype_policy import DTYPES
from draftmill.errors import DraftmillError, damaged

transformers.utils.logging.disable_progress_bar()  # a bar in a log file is noise
AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText")
NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")


def read_manifest(path: str | Path) -> dict:
    """The target's manifest.json, its folders made absolute."""
    return located(read_json(path), Path(path).parent)


def located(manifest: dict, parent: Path) -> dict:
    """The manifest in `parent` with the folders of checkpoint and tokenizer made absolute."""
    source = manifest["tokenizer_source"]
    return manifest | {
        "checkpoint": str(parent / manifest["checkpoint"]),
        "tokenizer_source": source | {"folder": str(parent / source["folder"])},
    }


def config_of(manifest: dict) -> transformers.PretrainedConfig:
    return transformers.AutoConfig.from_pretrained(
        manifest["checkpoint"], trust_remote_code=manifest["trust_remote_code"]
    )


def text_config(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """The configuration of the text decoder, nested or not."""
    return config.get_text_config(decoder=True)


def auto_class(config: transformers.PretrainedConfig) -> type:
    """The auto class that maps this configuration to a model with a language-model head."""
    for name in AUTO_CLASSES:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto
    raise DraftmillError(
        f"target: transformers has no language model for model_type '{config.model_type}'; an "
        "encoder-only or unknown model cannot be a target."
    )


def load(manifest: dict, dtype: str) -> nn.Module:
    """The whole target in evaluation mode, every weight from the checkpoint.

    Raises DraftmillError where the checkpoint lacks a key: it would be random otherwise.
    """
    for name, digest in manifest.get("files", {}).items():  # of a checkpoint that was built here
        if sha256_of(Path(manifest["checkpoint"]) / name) != digest:
            raise damaged(Path(manifest["checkpoint"]) / name, "not the bytes that were built")
    config = config_of(manifest)
    model, info = auto_class(config).from_pretrained(
        manifest["checkpoint"],
        dtype=DTYPES[dtype],
        trust_remote_code=manifest["trust_remote_code"],
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise DraftmillError(
            f"{manifest['checkpoint']}: lacks {len(missing)} weights that the model needs, "
            f"{missing[0]} first; they would be random; complete the checkpoint."
        )
    return model.eval().to(best_device())


def meta_model(config: transformers.PretrainedConfig) -> nn.Module:
    """The model's modules without memory or weights."""
    with torch.device("meta"):
        return auto_class(config).from_config(config).eval()


def text_decoder(model: nn.Module) -> nn.Module:
    """The module that owns the list of decoder layers of the text model."""
    layers = text_config(model.config).num_hidden_layers
    owners = [
        module
        for module in model.get_decoder().modules()
        if any(isinstance(c, nn.ModuleList) and len(c) == layers for c in module.children())
    ]
    if not owners:
        raise DraftmillError(
            f"target: no list of {layers} decoder layers found in {type(model).__name__}."
        )
    return owners[0]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers, in order."""
    layers = text_config(model.config).num_hidden_layers
    lists = (c for c in text_decoder(model).children() if isinstance(c, nn.ModuleList))
    return max(
        (c for c in lists if len(c) == layers), key=lambda c: sum(p.numel() for p in c.parameters())
    )


def final_norm(model: nn.Module) -> nn.Module:
    """The norm between the last decoder layer and the head."""
    decoder = text_decoder(model)
    for name in NORM_NAMES:
        if isinstance(getattr(decoder, name, None), nn.Module):
            return getattr(decoder, name)
    raise DraftmillError(
        f"target: {type(decoder).__name__} has no final norm under a known name "
        f"({', '.join(NORM_NAMES)})."
    )


def stop_ids(manifest: dict) -> list[int]:
    """The token ids that end an answer: generation config first, else the text configuration."""
    folder = Path(manifest["checkpoint"])
    found = None
    if (folder / "generation_config.json").is_file():
        found = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
    if found is None:
        found = text_config(config_of(manifest)).eos_token_id
    if found is None:
        raise DraftmillError(f"{folder}: names no eos_token_id, so no answer could ever end.")
    return [found] if isinstance(found, int) else list(found)


def length_limit(manifest: dict, max_length: int | None) -> int:
    """The longest sequence in tokens: the configured one, else the target's context."""
    context = manifest["context_length"]
    if max_length is not None and max_length > context:
        raise DraftmillError(
            f"config: target.max_length is {max_length}, but the target's context is {context}; text past "
            "it means nothing."
        )
    return max_length or context
