"""Drafting by blocks and verification with no cache at all: the target and the drafter start anew each step."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from reference_layers import Weights, attention, turned


class BlockDrafter:
    """An exported DFlash drafter with full attention, in float32, from the tensors of its file."""

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        layer = config["transformer_layer_config"]
        tensors = load_file(folder / "model.safetensors")
        self.mask = config["mask_token_id"]
        self.layers = [i - 1 for i in config["aux_hidden_state_layer_ids"]]  # output_of
        self.depth, self.shared = layer["num_hidden_layers"], layer["num_key_value_heads"]
        self.heads, self.activation = layer["num_attention_heads"], ACT2FN[layer["hidden_act"]]
        self.rotary = Qwen3RotaryEmbedding(Qwen3Config.from_dict(layer))
        self.kept = tensors["t2d"].nonzero().flatten() if "t2d" in tensors else None
        self.weights = Weights(tensors, layer["rms_norm_eps"], self.heads)

    @torch.inference_mode()
    def draft(self, ids: list[int], states: torch.Tensor, count: int) -> list[int]:
        """`count` tokens after `ids`; states: the target's features of all tokens but the last."""
        weights, shared = self.weights, self.shared
        context = weights.norm("hidden_norm", weights.linear("fc", states))
        x = weights.tensors["embed_tokens.weight"][[ids[-1]] + [self.mask] * count]
        for index in range(self.depth):
            name = f"layers.{index}.self_attn"
            residual, x = x, weights.norm(f"layers.{index}.input_layernorm", x)
            seen = torch.cat([context, x])
            q = weights.norm(f"{name}.q_norm", weights.heads(f"{name}.q_proj", x, self.heads))
            k = weights.norm(f"{name}.k_norm", weights.heads(f"{name}.k_proj", seen, shared))
            v = weights.heads(f"{name}.v_proj", seen, shared)
            cos, sin = (part[0] for part in self.rotary(seen, torch.arange(len(seen))[None]))
            q, k = turned(q, (cos[-len(x) :], sin[-len(x) :])), turned(k, (cos, sin))
            all_of_it = torch.ones(len(x), len(seen), dtype=torch.bool)
            x = residual + weights.linear(f"{name}.o_proj", attention(q, k, v, all_of_it))
            residual, x = x, weights.norm(f"layers.{index}.post_attention_layernorm", x)
            x = residual + weights.mlp(f"layers.{index}.mlp", x, self.activation)
        choices = weights.linear("lm_head", weights.norm("norm", x))[1:].argmax(-1)
        return (choices if self.kept is None else self.kept[choices]).tolist()


@torch.inference_mode()
def features(target, ids: list[int], layers: list[int]) -> torch.Tensor:
    """Outputs of the decoder layers, side by side: [tokens, layers * hidden]."""
    states = target(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[layer + 1][0] for layer in layers], dim=-1).float()


@torch.inference_mode()
def speculate(
    target, drafter: BlockDrafter, prompt: list[int], limit: int, stop: set[int], count: int
) -> tuple[list[int], list[int]]:
    """Decodes with drafts; returns the answer and the tokens emitted in each verification step.

    No block reaches past prompt and limit.
    """

    def choices(ids: list[int]) -> list[int]:
        return target(torch.tensor([ids]), use_cache=False).logits[0].argmax(-1).tolist()

    ids, emitted = [*prompt, choices(prompt)[-1]], []
    while len(ids) < len(prompt) + limit and ids[-1] not in stop:
        room = len(prompt) + limit - len(ids)
        drafts = drafter.draft(ids, features(target, ids[:-1], drafter.layers), min(count, room))
        verified = choices(ids + drafts)[len(ids) - 1 :]
        step = []
        for known, draft in zip(verified, [*drafts, None], strict=True):
            step.append(known)
            if known in stop or known != draft or len(step) == room:
                break
        ids += step
        emitted.append(len(step))
    return ids[len(prompt) :], emitted
