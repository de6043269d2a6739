"""Configurations of compressed-tensors that dequantise the weights and do nothing else."""

from draftmill.errors import DraftmillError


def weights_only(found: dict) -> dict:
    """A copy of a quantization_config without activations and KV cache: transformers would round them in every
    pass, dequantised weights or not. The states are to be those of the dequantised weights.

    Raises DraftmillError for what transformers would ignore in silence, or not dequantise.
    """
    # slow to import, and planning does without
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationScheme
    from torch import nn

    if found.get("transform_config"):
        raise refused("transform_config", "rotates activations while the model runs")
    if found.get("quantization_status") != "compressed":
        raise refused(
            "quantization_status",
            f"is {found.get('quantization_status')!r}, so its weights are not stored compressed",
        )
    groups = {}
    for name, group in (found.get("config_groups") or {}).items():
        scheme = QuantizationScheme.model_validate(group)
        if scheme.weights is None:
            continue
        # the format is inferred from the activations as well
        kept = scheme.format or infer_module_format(nn.Linear, scheme)
        dropped = {"input_activations": None, "output_activations": None}
        groups[name] = group | dropped | {"format": kept.value}
    return found | {"config_groups": groups, "kv_cache_scheme": None}


def refused(key: str, reason: str) -> DraftmillError:
    return DraftmillError(
        f"target: 'quantization_config.{key}' {reason}, which is not supported; take the checkpoint that it "
        "was quantised from."
    )
