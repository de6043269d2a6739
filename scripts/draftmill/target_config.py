"""The target's configuration as transformers reads it, and what of it is refused."""

import copy
from pathlib import Path

import transformers
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto

from draftmill.atomic import read_json
from draftmill.compressed_config import weights_only
from draftmill.errors import DraftmillError, broken

AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText")
FORMATS = ("pack-quantized", "float-quantized")  # of compressed-tensors
CONTEXTS = ("max_position_embeddings", "max_seq_len", "seq_length")
# what a forward pass is to return, whatever the checkpoint's config.json asks for
OUTPUTS = {"return_dict": True, "output_hidden_states": False, "output_router_logits": False}
TIED = "tie_word_embeddings"
TEXT_CONFIGS = ("text_config", "thinker_config", "language_config", "llm_config")  # in wrappers
QUANTISATIONS = ("compressed-tensors", "fp8")  # those that are tested to give the same states twice


def config_of(manifest: dict) -> PretrainedConfig:
    """The target's configuration, with its quantisation told to dequantise.

    Raises DraftmillError where the model or its quantisation is not supported.
    """
    if manifest["trust_remote_code"]:
        refuse_foreign_code(Path(manifest["checkpoint"]) / "config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(
            manifest["checkpoint"], trust_remote_code=manifest["trust_remote_code"]
        )
    except Exception as error:  # nonsense in it, or whatever the checkpoint's own code raises
        path = Path(manifest["checkpoint"]) / "config.json"
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        own = "auto_map" in read_json(path, broken) and not manifest["trust_remote_code"]
        mend = (
            "its model code comes with it: read it, then set target.trust_remote_code: true"
            if own
            else f"correct it, or take a model that transformers {transformers.__version__} knows"
        )
        raise DraftmillError(f"{path}: transformers cannot read it ({reason}); {mend}.") from None
    check_supported(config)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name, value in OUTPUTS.items():
            if isinstance(part, PretrainedConfig) and hasattr(part, name):
                setattr(part, name, value)
    return config


def refuse_foreign_code(path: Path) -> None:
    """Code of another repository has no pinned revision: it could change under a finished run."""
    for name in (read_json(path, broken).get("auto_map") or {}).values():
        if "--" in str(name):
            raise DraftmillError(
                f"{path}: takes its code from another repository ({name}), of which no revision is pinned; "
                "copy the checkpoint and that code into one folder and name it in target.path."
            )


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the text decoder, nested or not."""
    return config.get_text_config(decoder=True)


def context_length(text: PretrainedConfig) -> int | None:
    """The longest sequence in tokens; None where the configuration knows none (state-space models)."""
    return next((n for key in CONTEXTS if isinstance(n := getattr(text, key, None), int)), None)


def angle_border(text: PretrainedConfig) -> int | None:
    """The length in tokens above which a whole sequence gets other rotary angles (longrope); None where there
    is none. A shorter sequence must not be padded beyond it."""
    found = getattr(text, "rope_parameters", None) or {}
    each = [found, *(one for one in found.values() if isinstance(one, dict))]  # by kind of layer
    borders = [
        one["original_max_position_embeddings"]
        for one in each
        if one.get("rope_type") == "longrope"
    ]
    return min(borders, default=None)


def auto_classes(config: PretrainedConfig) -> list[type]:
    """The auto classes that map this configuration to a model with a language-model head, text-only first.

    transformers' own classes; code of the checkpoint's own only where there is none.
    """
    autos = [getattr(transformers, name) for name in AUTO_CLASSES]
    remote = getattr(config, "auto_map", None) or {}
    native = [auto for auto in autos if type(config) in auto._model_mapping]
    found = native or [auto for auto in autos if auto.__name__ in remote]
    if not found:
        raise DraftmillError(
            f"target: transformers has no language model for model_type '{config.model_type}'; an "
            "encoder-only or unknown model cannot be a target."
        )
    return found


def check_supported(config: PretrainedConfig) -> None:
    """Refuses what is no causal decoder, and quantisations that are not known to work."""
    auto_classes(config)
    kind = f"target: model_type '{config.model_type}'"
    if config.is_encoder_decoder:
        raise DraftmillError(
            f"{kind} is an encoder-decoder; speculative decoding here needs a decoder-only model."
        )
    encoders = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if config.model_type in encoders and not getattr(config, "is_decoder", False):
        raise DraftmillError(
            f"{kind} is an encoder-only model (its attention sees the future); a target must be a "
            "causal language model."
        )
    check_quantisation(config, kind)


def check_quantisation(config: PretrainedConfig, kind: str) -> None:
    found = quantisation(config)
    if found is None:
        return
    method, layout = found.get("quant_method"), found.get("format")
    if method not in QUANTISATIONS:
        raise DraftmillError(
            f"{kind}: its weights are quantised by '{method}', which is not supported; supported are "
            f"{', '.join(QUANTISATIONS)} and unquantised weights, so take another checkpoint of this model."
        )
    if method == "compressed-tensors" and (layout not in FORMATS or not found.get("config_groups")):
        raise DraftmillError(
            f"{kind}: its weights have compressed-tensors' format '{layout}' with "
            f"{len(found.get('config_groups') or {})} config_groups; supported is {', '.join(FORMATS)} with "
            "groups, so take another checkpoint of this model."
        )


def quantisation(config: PretrainedConfig) -> dict | None:
    """The quantization_config, which some wrappers keep in their text configuration."""
    for holder in (config, text_config(config)):
        found = getattr(holder, "quantization_config", None)
        if found is not None:
            return found if isinstance(found, dict) else found.to_dict()
    return None


def dequantising(config: PretrainedConfig, decoder: str) -> PretrainedConfig:
    """A copy whose weights are dequantised when they are loaded, on every device alike.

    decoder: path of the text decoder in the model. What stands outside of it (a vision tower) is left as
    it is stored; Kimi-K2.5's own list forgets it.
    """
    found = quantisation(config)
    if found is None:
        return config
    config = copy.deepcopy(config)
    holder = text_config(config)
    if holder is not config and hasattr(holder, "quantization_config"):
        del holder.quantization_config
    if found["quant_method"] == "compressed-tensors":
        outside = rf"re:(?!{decoder}\.).*"
        found = weights_only(found) | {"ignore": [*(found.get("ignore") or []), outside]}
    config.quantization_config = found | {"dequantize": True}
    return config


def tie_flags(folder: Path) -> list[bool]:
    """What config.json itself says of tie_word_embeddings: at the top, and in the text configuration."""
    found, flags = read_json(folder / "config.json", broken), []
    while isinstance(found, dict):
        if isinstance(found.get(TIED), bool):
            flags.append(found[TIED])
        found = next((found[name] for name in TEXT_CONFIGS if name in found), None)
    return flags


def stop_ids(manifest: dict) -> list[int]:
    """The token ids that end an answer: generation config first, else the text configuration."""
    folder = Path(manifest["checkpoint"])
    path, found = folder / "generation_config.json", None
    if path.is_file():
        found = read_json(path, broken).get("eos_token_id")
    if found is None:
        path, config = folder / "config.json", config_of(manifest)
        found = text_config(config).eos_token_id
        found = getattr(config, "eos_token_id", None) if found is None else found
    ids = found if isinstance(found, list) else [found]
    if not ids or not all(type(i) is int for i in ids):
        raise DraftmillError(
            f"{path}: eos_token_id is {found!r}, expected a token id or several, or no answer could ever end; "
            "correct it."
        )
    return ids
