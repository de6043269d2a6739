"""What the hub's checkpoints hold beyond what transformers saves: layers for multi-token prediction
(MTP), FP8 weights, older names. Kimi has a module of its own.

Each layout takes (config, tensors) and changes both in place.
"""

import re
from collections.abc import Iterable

import torch

Tensors = dict[str, torch.Tensor]
BLOCK = 128  # rows and columns that share one FP8 scale
LARGEST = torch.finfo(torch.float8_e4m3fn).max
BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
PROJECTION = re.compile(r"(?<!eh)_proj(_with_mqa)?\.weight$")


def fresh(shape: Iterable[int]) -> torch.Tensor:
    """A random bf16 tensor; vectors lie around 1 like norm gains."""
    noise = torch.randn(tuple(shape))
    scaled = noise * noise.shape[-1] ** -0.5 if noise.dim() > 1 else 1 + 0.25 * noise
    return scaled.to(torch.bfloat16)


def layer_like(tensors: Tensors, prefix: str) -> Tensors:
    """Fresh tensors of the same names (without `prefix`) and shapes as the layer at `prefix`."""
    layer = [key for key in tensors if key.startswith(prefix)]
    return {key.removeprefix(prefix): fresh(tensors[key].shape) for key in layer}


def keep_router_bias_fp32(tensors: Tensors) -> None:
    """DeepSeek and Kimi store the correction bias of their routers in fp32, all else in bf16."""
    for key in tensors:
        if key.endswith("e_score_correction_bias"):
            tensors[key] = tensors[key].float()


def gemma_on_hub(config: dict, tensors: Tensors) -> None:
    """Gemma 3 keeps the older names of its vision tower."""
    tower = "vision_tower."
    for key in [key for key in tensors if key.startswith(tower)]:
        tensors[f"{tower}vision_model.{key.removeprefix(tower)}"] = tensors.pop(key)


def add_deepseek_mtp(config: dict, tensors: Tensors) -> None:
    """The MTP layer, which DeepSeek-V3 stores as one decoder layer more than the config counts."""
    last = config["num_hidden_layers"]
    width, rows = config["hidden_size"], config["vocab_size"]
    extra = layer_like(tensors, f"model.layers.{last - 1}.")
    for key in ("enorm", "hnorm", "shared_head.norm"):
        extra[f"{key}.weight"] = fresh([width])
    for key in ("embed_tokens", "shared_head.head"):
        extra[f"{key}.weight"] = fresh([rows, width])
    extra["eh_proj.weight"] = fresh([width, 2 * width])
    tensors |= {f"model.layers.{last}.{key}": value for key, value in extra.items()}
    keep_router_bias_fp32(tensors)


def add_qwen_mtp(config: dict, tensors: Tensors) -> None:
    """The MTP module of Qwen3.5 and Qwen3.6: a full-attention layer beside the model."""
    text = config["text_config"]
    full = text["layer_types"].index("full_attention")
    width = text["hidden_size"]
    layer = layer_like(tensors, f"model.language_model.layers.{full}.")
    tensors |= {f"mtp.layers.0.{key}": value for key, value in layer.items()}
    for key in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{key}.weight"] = fresh([width])
    tensors["mtp.fc.weight"] = fresh([width, 2 * width])
    text |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    text["dtype"] = config.pop("dtype")


def to_block_fp8(config: dict, tensors: Tensors) -> None:
    """FP8 as in Qwen3.6-FP8: the decoder's large projections with one bf16 scale for each block."""
    kept = []
    for key in [key for key in tensors if key.endswith(".weight")]:
        large = key.endswith(("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight"))
        if large and ".visual." not in key:
            tensors[key], tensors[f"{key}_scale_inv"] = block_fp8(tensors[key], torch.bfloat16)
        elif tensors[key].dim() > 1:
            kept.append(key.removesuffix(".weight"))
    config["quantization_config"] = BLOCK_FP8 | {"modules_to_not_convert": kept}


def to_deepseek_fp8(config: dict, tensors: Tensors) -> None:
    """FP8 as in DeepSeek-V3: every projection, the experts' included, with one fp32 scale for each block;
    the configuration does not say what is left in bf16 (routers, embedding, head)."""
    for key in [key for key in tensors if PROJECTION.search(key)]:
        tensors[key], tensors[f"{key}_scale_inv"] = block_fp8(tensors[key], torch.float32)
    config["quantization_config"] = BLOCK_FP8


def block_fp8(weight: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> float8_e4m3fn of that shape, scales [ceil(out / 128), ceil(in / 128)]."""
    blocks = [-(-size // BLOCK) for size in weight.shape]
    scale = torch.empty(blocks, dtype=scale_dtype)
    packed = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(blocks[0]):
        for column in range(blocks[1]):
            here = (
                slice(row * BLOCK, (row + 1) * BLOCK),
                slice(column * BLOCK, (column + 1) * BLOCK),
            )
            scale[row, column] = weight[here].abs().max().float() / LARGEST
            packed[here] = to_fp8(weight[here], scale[row, column])
    return packed, scale


def to_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The nearest float8_e4m3fn to weight / scale."""
    scaled = weight.float() / scale.float()
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
