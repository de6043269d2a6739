"""How large a target is: exact parameter counts from its configuration, on the meta device."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from draftmill.dtype_policy import BYTES
from draftmill.target_config import context_length, quantisation, text_config
from draftmill.target_skeleton import PARTS
from draftmill.target_structure import (
    decoder_layers,
    final_norm,
    meta_model,
    path_of,
    text_decoder,
)

# the names under which families keep the number of routed experts, and of those that a token visits
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
MASKED = {"full_attention", "sliding_attention", "chunked_attention"}
ROUTED = re.compile(r"(^|\.)experts\.")


@dataclass(frozen=True)
class TargetSize:
    """Parameter counts; `active` is what one token is multiplied with: decoder layers, their routed experts
    scaled by experts-per-token / experts, the final norm and the head. The embedding is a look-up."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    vocab: int
    context: int | None  # None: the configuration knows no longest sequence
    mask_kinds: (
        int  # attention masks that a padded batch holds: of whole, sliding or chunked attention
    )
    dtype: str
    total: int
    embedding: int
    head: int  # of its own: 0 where it is tied to the embedding
    largest_layer: int
    experts_part: (
        int  # what of a fused tensor of experts is filled in at a time, 0 in a dense target
    )
    beside_layers: int  # what text needs beside the layers: embedding, final norm, head of its own
    decoder_layers: int
    active_layers: float
    output: int  # multiplied per token for logits, tied or not
    experts: str  # how routed experts were counted; empty for a dense target
    stored: int  # bytes of the checkpoint as its configuration describes it

    @property
    def active(self) -> float:
        return self.active_layers + self.output

    def bytes_of(self, parameters: float) -> int:
        return round(parameters * BYTES[self.dtype])


def target_size(config: object, dtype: str) -> TargetSize:
    """The size of the model that the stages would load, in the declared dtype.

    Raises DraftmillError where transformers has no language model for the configuration.
    """
    model = meta_model(config)
    text = text_config(config)
    layers = decoder_layers(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight or bool(text.tie_word_embeddings)
    share, experts = expert_share(text)
    norm = count(final_norm(model))
    experts_of = [p for n, p in layers.named_parameters() if ROUTED.search(n)]
    routed = sum(p.numel() for p in experts_of)
    beside = {id(p): p.numel() for p in text_decoder(model).parameters()}
    beside |= {id(p): p.numel() for p in embedding.parameters()}
    beside |= {} if tied else {id(p): p.numel() for p in head.parameters()}
    decoder = count(layers)
    total = count(model) - (count(head) if tied and head.weight is not embedding.weight else 0)
    widths = (getattr(text, "intermediate_size", None), getattr(text, "moe_intermediate_size", 0))
    return TargetSize(
        architecture=type(model).__name__,
        layers=len(layers),
        hidden=text.hidden_size,
        intermediate=max(w or 0 for w in widths),
        vocab=head.weight.shape[0],
        context=context_length(text),
        mask_kinds=len(MASKED.intersection(getattr(text, "layer_types", None) or [])) or 1,
        dtype=dtype,
        total=total,
        embedding=count(embedding),
        head=0 if tied else count(head),
        largest_layer=max(map(count, layers)),
        experts_part=max((filled_at_once(p.shape) for p in experts_of if p.dim() > 2), default=0),
        beside_layers=sum(beside.values()) - decoder,
        decoder_layers=decoder,
        active_layers=decoder - routed * (1 - share) + norm,
        output=count(head),
        experts=experts if routed else "",
        stored=stored_bytes(config, model, dtype, total),
    )


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def filled_at_once(experts: torch.Size) -> int:
    """Parameters of the experts that a streamed layer's fused tensor [experts, out, in] takes in one step."""
    return max(1, experts[0] // PARTS) * experts[1:].numel()


def expert_share(text: object) -> tuple[float, str]:
    """The share of the routed experts that one token visits, and the sentence that says so."""
    experts = next((n for k in EXPERTS if (n := getattr(text, k, None))), None)
    visited = next((n for k in EXPERTS_PER_TOKEN if (n := getattr(text, k, None))), None)
    if experts is None or visited is None:
        return 1.0, "all experts counted as active: the configuration names no experts per token"
    return visited / experts, f"parameters named *.experts.* x {visited} / {experts}"


def stored_bytes(config: object, model: nn.Module, dtype: str, total: int) -> int:
    """Bytes of the checkpoint on disk, about: quantised weights with their scales where the configuration has
    such, every other parameter in the declared dtype."""
    found = quantisation(config)
    if found is None:
        return total * BYTES[dtype]
    if found["quant_method"] == "fp8":
        weights = {"num_bits": 8, "block_structure": found.get("weight_block_size")}
        ignored, scale = found.get("modules_to_not_convert") or [], BYTES["float32"]
    else:
        weights = next(iter(found["config_groups"].values()))["weights"]
        ignored, scale = found.get("ignore") or [], BYTES["bfloat16"]
    decoder = text_decoder(model)
    inside = path_of(model, decoder)
    packed = [
        p.shape
        for n, p in decoder.named_parameters()
        if p.dim() > 1 and "embed" not in n and not is_router(n)
        if not is_ignored(f"{inside}.{n}", ignored)
    ]
    count = sum(shape.numel() for shape in packed)
    each = weights["num_bits"] / 8
    scales = sum(scale_count(shape, weights) for shape in packed)
    return round(count * each + scales * scale + (total - count) * BYTES[dtype])


def scale_count(shape: torch.Size, weights: dict) -> int:
    """How many scales a weight [..., out, in] has: one for each group or block, else for each row or tensor."""
    rows, columns = shape[-2:]
    outer = shape[:-2].numel()
    if block := weights.get("block_structure"):
        return outer * math.ceil(rows / block[0]) * math.ceil(columns / block[1])
    if group := weights.get("group_size"):
        return outer * rows * math.ceil(columns / group)
    return outer * (rows if weights.get("strategy") == "channel" else 1)


def is_router(name: str) -> bool:
    return name.endswith(("mlp.gate.weight", "router.weight"))


def is_ignored(name: str, patterns: list[str]) -> bool:
    """Whether a parameter is left as it is: by a module's path or a part of it, or by `re:` pattern."""
    return any(
        re.match(p[3:], name) if p.startswith("re:") else f".{p}." in f".{name}" for p in patterns
    )


def checkpoint_bytes(folder: Path | None, size: TargetSize) -> tuple[int, str]:
    """Bytes that loading the target reads, and how they are known."""
    files = list(folder.glob("*.safetensors")) if folder else []
    if files:
        return sum(p.stat().st_size for p in files), "size of its safetensors files"
    return size.stored, "from its config.json"
