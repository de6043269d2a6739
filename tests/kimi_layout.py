"""Kimi-K2.5 as its authors store it: MoonViT's names, one key for each expert, remote code, INT4.

Each layout takes (config, tensors) and changes both in place.
"""

import re
from collections.abc import Iterator

import torch

from family_layouts import Tensors, keep_router_bias_fp32

ROPE = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
VISION, CODE = "vision_tower.", "modeling_kimi_k25.KimiK25ForConditionalGeneration"
ON_HUB = {  # the first that a name starts with
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
    "model.mm_projector.in_proj.": "mm_projector.proj.0.",
    "model.mm_projector.out_proj.": "mm_projector.proj.2.",
    "model.mm_projector.": "mm_projector.",
    "model.vision_tower.patch_embed.pos_emb.position_embeddings": "vision_tower.patch_embed.pos_emb.weight",
    "model.vision_tower.patch_embed.": "vision_tower.patch_embed.",
    "model.vision_tower.layers.": "vision_tower.encoder.blocks.",
    "model.vision_tower.": "vision_tower.encoder.",
}
IN_BLOCK = {
    ".norm1.": ".norm0.",
    ".norm2.": ".norm1.",
    ".fc1.": ".fc0.",
    ".fc2.": ".fc1.",
    ".attn.proj.": ".wo.",
}
ROUTED_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")
GROUP, NIBBLES = 32, 8  # weights that share one INT4 scale; weights in one int32
WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": GROUP,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
PACKED = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": WEIGHTS,
        }
    },
    "format": "pack-quantized",
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def kimi_on_hub(config: dict, tensors: Tensors) -> None:
    renamed = [pair for key, value in tensors.items() for pair in hub_tensors(key, value)]
    tensors.clear()
    tensors |= dict(renamed)
    for key in [key for key in tensors if key.startswith(VISION) and ".q_proj." in key]:
        # the hub orders the rows for another form of rotary embedding; random rows have no order
        parts = [tensors.pop(key.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        tensors[key.replace(".attn.q_proj.", ".wqkv.")] = torch.cat(parts)
    keep_router_bias_fp32(tensors)
    spell_text(config["text_config"])
    spell_vision(config["vision_config"])
    config |= {key: config["text_config"][key] for key in ("bos_token_id", "eos_token_id")}
    config |= {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k25.KimiK25Config",
            "AutoModel": CODE,
            "AutoModelForCausalLM": CODE,
        },
        "media_placeholder_token_id": config["image_token_id"],
        "pad_token_id": config["text_config"]["pad_token_id"],
        "use_unified_vision_chunk": True,
    }


def hub_tensors(key: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors on the hub of one parameter of transformers' model, with their names."""
    start = next(start for start in ON_HUB if key.startswith(start))
    name = key.replace(start, ON_HUB[start], 1)
    if name.startswith(VISION):
        for ours, theirs in IN_BLOCK.items():
            if ours in name:
                name = name.replace(ours, theirs)
                break
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield name, value
        return
    experts, part = name.rsplit(".", 1)
    for number, expert in enumerate(value):
        if part == "down_proj":
            yield f"{experts}.{number}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{experts}.{number}.gate_proj.weight", gate
            yield f"{experts}.{number}.up_proj.weight", up


def spell_text(text: dict) -> None:
    text |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "dtype": "bfloat16",
        "model_type": "kimi_k2",
        "moe_layer_freq": 1,
        "rope_scaling": ROPE,
        "rope_theta": 50000.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    del text["rope_parameters"]


def spell_vision(vision: dict) -> None:
    """Adds the hub's spelling. transformers reads only its own, whose defaults fit the real size."""
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"):
        vision[f"vt_{name}"] = vision[name]
    for name in ("height", "width", "time"):
        vision[f"init_pos_emb_{name}"] = vision[f"pos_emb_{name}"]
    vision |= {"merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "model_type": ""}


def to_packed_int4(config: dict, tensors: Tensors) -> None:
    """The routed experts in the pack-quantized format of compressed-tensors."""
    pack(tensors, ROUTED_EXPERT)
    config["text_config"]["quantization_config"] = PACKED | {
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
    }


def pack(tensors: Tensors, names: re.Pattern) -> None:
    """Replaces weights by packed numbers, scales and shapes."""
    for key in [key for key in tensors if names.search(key)]:
        weight = tensors.pop(key)
        tensors[f"{key}_packed"], tensors[f"{key}_scale"] = packed_int4(weight)
        tensors[f"{key}_shape"] = torch.tensor(weight.shape, dtype=torch.int32)


def packed_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> int32 [out, in / 8], bf16 scales [out, in / 32].

    A number q in -8 .. 7 is stored as q + 8, the first of eight in the lowest bits.
    """
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).to(torch.bfloat16)
    numbers = (groups / scale.float()).round().clamp(-8, 7).int() + 8
    shifts = 4 * torch.arange(NIBBLES, dtype=torch.int32)
    packed = (numbers.view(rows, columns // NIBBLES, NIBBLES) << shifts).sum(-1, dtype=torch.int32)
    return packed, scale.squeeze(-1)
