"""Where the parts of a target are in its modules: decoder, layers, final norm, embedding, head.

Found by structure, with no table of families. What is found is checked against the running model when
states are extracted (capture.py): the final norm's output must be what the decoder returns.
"""

import itertools
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig

from draftmill.checkpoint_files import weight_map
from draftmill.checkpoint_names import Conversion
from draftmill.errors import DraftmillError
from draftmill.target_config import auto_classes, config_of, text_config

PREFERRED_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm")


def meta_model(
    config: PretrainedConfig, trust_remote_code: bool = False, folder: Path | None = None
) -> nn.Module:
    """The model's modules without memory or weights.

    Some multimodal families have a text-only class whose names their checkpoints do not fit; where a family
    has two classes, the first whose embedding is among the names in `folder` is taken.
    """
    models = (_on_meta(auto, config, trust_remote_code) for auto in auto_classes(config))
    first = next(models)
    if folder is None:
        return first
    return next((m for m in itertools.chain([first], models) if _fits(m, folder)), first)


def model_of(manifest: dict) -> nn.Module:
    """The target's modules without memory or weights, in the class that fits its checkpoint."""
    folder = Path(manifest["checkpoint"])
    return meta_model(config_of(manifest), manifest["trust_remote_code"], folder)


def _on_meta(auto: type, config: PretrainedConfig, trust_remote_code: bool) -> nn.Module:
    try:
        with torch.device("meta"):
            return auto.from_config(config, trust_remote_code=trust_remote_code).eval()
    # sizes that do not fit together, or whatever the checkpoint's own code raises
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:300]
        raise DraftmillError(
            f"target: no model can be made of the config.json of model_type '{config.model_type}' "
            f"({type(error).__name__}: {reason}); correct config.json, or install what its own code needs."
        ) from error


def _fits(model: nn.Module, folder: Path) -> bool:
    embedding = f"{path_of(model, model.get_input_embeddings())}.weight"
    conversion = Conversion(model)
    names = conversion.unnumbered(weight_map(folder))
    return any(conversion.target_of(name)[0] == embedding for name in names)


def layer_count(config: PretrainedConfig) -> int:
    """Number of decoder layers of the text model."""
    found = getattr(text_config(config), "num_hidden_layers", None)
    if not isinstance(found, int) or found < 1:
        raise DraftmillError(
            f"target: the configuration of model_type '{config.model_type}' says nothing of its "
            f"decoder layers (num_hidden_layers is {found!r})."
        )
    return found


def text_decoder(model: nn.Module) -> nn.Module:
    """The module that owns the list of decoder layers of the text model."""
    return _decoder_and_layers(model)[0]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers, in order."""
    return _decoder_and_layers(model)[1]


def _decoder_and_layers(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    count = layer_count(model.config)
    for module in model.get_decoder().modules():
        lists = [c for c in module.children() if isinstance(c, nn.ModuleList) and len(c) == count]
        if lists:
            return module, max(lists, key=lambda c: sum(p.numel() for p in c.parameters()))
    raise DraftmillError(
        f"target: {type(model).__name__} has no list of {count} decoder layers, so this family is not "
        "supported."
    )


def final_norm(model: nn.Module) -> nn.Module:
    """The norm between the last decoder layer and the head.

    It is a child of the decoder whose class is a norm, and stands after the layers there.
    """
    decoder, layers = _decoder_and_layers(model)
    children = list(decoder.named_children())
    after = [child is layers for _, child in children].index(True) + 1
    norms = {n: m for n, m in children[after:] if is_norm(m, text_config(model.config).hidden_size)}
    norms = norms or {n: m for n, m in children if n in PREFERRED_NORMS}
    for name in PREFERRED_NORMS:
        if name in norms:
            return norms[name]
    if len(norms) == 1:
        return next(iter(norms.values()))
    raise DraftmillError(
        f"target: {type(decoder).__name__} has {len(norms)} norms after its layers "
        f"({', '.join(norms) or 'none'}), expected one final norm; this family is not supported."
    )


def is_norm(module: nn.Module, hidden: int) -> bool:
    named = "norm" in type(module).__name__.lower()
    return named and all(p.shape == (hidden,) for p in module.parameters())


def output_head(model: nn.Module) -> nn.Module:
    """lm_head. Raises DraftmillError where the model has none."""
    head = model.get_output_embeddings()
    if not isinstance(getattr(head, "weight", None), torch.Tensor):
        raise DraftmillError(
            f"target: {type(model).__name__} has no output embedding (lm_head), so it is no language "
            "model that can be a target."
        )
    return head


def path_of(model: nn.Module, module: nn.Module) -> str:
    """A module's dotted name in the model."""
    return next(name for name, found in model.named_modules() if found is module)
