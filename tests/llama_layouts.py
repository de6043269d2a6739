"""A dense Llama quantised by llm-compressor, in the formats of compressed-tensors.

Each layout takes (config, tensors) and changes both in place.
"""

import re

import torch

from family_layouts import LARGEST, Tensors, to_fp8
from kimi_layout import PACKED, WEIGHTS, pack

LINEAR = re.compile(r"\.layers\..*_proj\.weight$")
PER_CHANNEL = WEIGHTS | {
    "group_size": None,
    "num_bits": 8,
    "strategy": "channel",
    "type": "float",
}
PER_TOKEN = PER_CHANNEL | {"dynamic": True, "observer": None, "strategy": "token"}


def to_w4a16(config: dict, tensors: Tensors) -> None:
    """INT4 in groups for every linear layer but the head."""
    pack(tensors, LINEAR)
    config["quantization_config"] = PACKED | {"ignore": ["lm_head"]}


def to_fp8_dynamic(config: dict, tensors: Tensors) -> None:
    """FP8 with a scale for each output channel; served, it quantises activations token by token."""
    for key in [key for key in tensors if LINEAR.search(key)]:
        tensors[key], tensors[f"{key}_scale"] = channel_fp8(tensors[key])
    group = {"input_activations": PER_TOKEN, "weights": PER_CHANNEL}
    groups = {"group_0": PACKED["config_groups"]["group_0"] | group}
    about = {"config_groups": groups, "format": "float-quantized", "ignore": ["lm_head"]}
    config["quantization_config"] = PACKED | about


def channel_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> float8_e4m3fn of that shape, bf16 scales [out, 1]."""
    scale = (weight.float().abs().amax(-1, keepdim=True) / LARGEST).to(torch.bfloat16)
    return to_fp8(weight, scale), scale
