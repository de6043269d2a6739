"""How large a target is: exact parameter counts from its configuration, on the meta device."""

import re
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from draftmill.dtype_policy import BYTES
from draftmill.target_config import quantisation, text_config
from draftmill.target_structure import decoder_layers, final_norm, meta_model, text_decoder

# the names under which families keep the number of routed experts, and of those that a token visits
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
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
    context: int
    dtype: str
    total: int
    embedding: int
    head: int  # of its own: 0 where it is tied to the embedding
    largest_layer: int
    largest_experts: int  # of one fused tensor, 0 in a dense target
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
        context=text.max_position_embeddings,
        dtype=dtype,
        total=total,
        embedding=count(embedding),
        head=0 if tied else count(head),
        largest_layer=max(map(count, layers)),
        largest_experts=max((p.numel() for p in experts_of if p.dim() > 2), default=0),
        beside_layers=sum(beside.values()) - decoder,
        decoder_layers=decoder,
        active_layers=decoder - routed * (1 - share) + norm,
        output=count(head),
        experts=experts if routed else "",
        stored=stored_bytes(config, model, dtype, total),
    )


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def expert_share(text: object) -> tuple[float, str]:
    """The share of the routed experts that one token visits, and the sentence that says so."""
    experts = next((n for k in EXPERTS if (n := getattr(text, k, None))), None)
    visited = next((n for k in EXPERTS_PER_TOKEN if (n := getattr(text, k, None))), None)
    if experts is None or visited is None:
        return 1.0, "all experts counted as active: the configuration names no experts per token"
    return visited / experts, f"parameters named *.experts.* x {visited} / {experts}"


def stored_bytes(config: object, model: nn.Module, dtype: str, total: int) -> int:
    """Bytes of the checkpoint on disk: packed integers with one bf16 scale a group where a
    compressed-tensors configuration says so, else every parameter in the declared dtype."""
    found = quantisation(config) or {}
    groups = found.get("config_groups")
    weights = next(iter(groups.values()))["weights"] if groups else {}
    if not weights.get("num_bits") or not weights.get("group_size"):
        return total * BYTES[dtype]
    ignored = found.get("ignore") or []
    decoder = text_decoder(model)
    packed = sum(
        p.numel()
        for n, p in decoder.named_parameters()
        if p.dim() > 1 and "embed" not in n and not is_router(n) and not is_ignored(n, ignored)
    )
    each = weights["num_bits"] / 8 + 2 / weights["group_size"]
    return round(packed * each + (total - packed) * BYTES[dtype])


def is_router(name: str) -> bool:
    return name.endswith(("mlp.gate.weight", "router.weight"))


def is_ignored(name: str, patterns: list[str]) -> bool:
    """Whether compressed-tensors leaves a parameter as it is: by module name, or by `re:` pattern."""
    module = name.rpartition(".")[0] or name
    return any(
        re.match(p[3:], name) if p.startswith("re:") else module.endswith(p) for p in patterns
    )


def checkpoint_bytes(folder: Path | None, size: TargetSize) -> tuple[int, str]:
    """Bytes that loading the target reads, and how they are known."""
    files = list(folder.glob("*.safetensors")) if folder else []
    if files:
        return sum(p.stat().st_size for p in files), "size of its safetensors files"
    return size.stored, "from its config.json"
