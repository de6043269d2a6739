"""A drafter's layers started from decoder layers of its target.

The context of a drafter's layer is then what the target's layer would see: fc selects the state that enters
the first of them, hidden_norm is that layer's own norm, and keys and values are the target's. Only layers with
Llama's parts and sizes can be taken.
"""

import torch
from torch import nn
from torch.nn import functional

from draftmill.dtype_policy import DTYPES
from draftmill.errors import DraftmillError
from draftmill.target_head import with_weights
from draftmill.target_skeleton import Skeleton
from draftmill.target_structure import decoder_layers, final_norm, model_of

LINEAR = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = ("input_layernorm", "post_attention_layernorm")
PER_HEAD = {"self_attn.q_norm": "self_attn.q_proj", "self_attn.k_norm": "self_attn.k_proj"}


@torch.no_grad()
def start_from(
    drafter: nn.Module,
    indices: list[int],
    layers: list[int],
    manifest: dict,
    tensors: dict[str, torch.Tensor],
    aux: torch.Tensor,
) -> None:
    """Fills the drafter's layers, fc and both norms.

    indices: the target's layer for each of the drafter's. layers: output_of of the states that fc reads.
    tensors: head.safetensors. aux: [tokens, layers * hidden], states of some text, for the scale of queries and
    keys.
    Raises DraftmillError where the target lacks such a layer or its parts are of another kind.
    """
    skeleton = Skeleton(manifest, DTYPES[manifest["dtype"]], "cpu")
    theirs = decoder_layers(skeleton.model)
    hidden = drafter.fc.out_features
    for own, index in zip(drafter.layers, indices, strict=True):
        if index >= len(theirs):
            raise DraftmillError(
                f"config: initial_layers names layer {index} of the target, which has {len(theirs)}, 0 to "
                f"{len(theirs) - 1}."
            )
        skeleton.load(skeleton.of_layer(index))
        place = nearest(layers, index - 1)
        states = aux[:, place * hidden : (place + 1) * hidden].float()
        copy(own, theirs[index], f"layer {index}", states)
    first = indices[0]
    place = nearest(layers, first - 1)
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, place * hidden : (place + 1) * hidden] = torch.eye(hidden)
    before = part(theirs[first], "input_layernorm", f"layer {first}")
    drafter.hidden_norm.weight.copy_(scale_of(before, f"layer {first}: input_layernorm"))
    last = with_weights(final_norm(model_of(manifest)), tensors, "norm.")
    drafter.norm.weight.copy_(scale_of(last, "the final norm"))


def nearest(layers: list[int], wanted: int) -> int:
    """The place of the captured layer that is nearest to `wanted`."""
    return min(range(len(layers)), key=lambda place: abs(layers[place] - wanted))


def copy(own: nn.Module, layer: nn.Module, where: str, states: torch.Tensor) -> None:
    """The weights of a target's layer, by their names."""
    for name in LINEAR:
        source, goal = part(layer, name, where), own.get_submodule(name)
        if getattr(source, "bias", None) is not None or source.weight.shape != goal.weight.shape:
            raise unlike(f"{where}: {name} is {tuple(source.weight.shape)} or has a bias")
        goal.weight.copy_(source.weight)
    for name in NORMS:
        scale = scale_of(part(layer, name, where), f"{where}: {name}")
        own.get_submodule(name).weight.copy_(scale)
    normalised = functional.normalize(states, dim=-1) * states.shape[-1] ** 0.5
    normalised = normalised * own.input_layernorm.weight.float()
    for name, projection in PER_HEAD.items():
        goal = own.get_submodule(name)
        if hasattr(layer.self_attn, name.rpartition(".")[2]):
            scale = scale_of(part(layer, name, where), f"{where}: {name}")
            goal.weight.copy_(scale)
        else:  # queries and keys that have no norm keep, on average, their size
            weight = own.get_submodule(projection).weight.float()
            heads = functional.linear(normalised, weight).unflatten(-1, (-1, len(goal.weight)))
            goal.weight.fill_(heads.square().mean(-1).sqrt().mean())


def scale_of(norm: nn.Module, where: str) -> torch.Tensor:
    """What an RMS norm multiplies with, whether it stores that or, as some families, one less."""
    width = norm.weight.shape[0]
    scale = norm(torch.ones(1, width, dtype=norm.weight.dtype))[0].float()
    probe = torch.linspace(-1, 2, width, dtype=torch.float32)[None]
    expected = probe / probe.square().mean().sqrt() * scale
    found = norm(probe.to(norm.weight.dtype)).float()
    if not torch.allclose(found, expected, atol=0.05, rtol=0.05):
        raise unlike(f"{where} is no RMS norm")
    return scale


def part(layer: nn.Module, name: str, where: str) -> nn.Module:
    try:
        return layer.get_submodule(name)
    except AttributeError:
        raise unlike(f"{where} has no {name}") from None


def unlike(what: str) -> DraftmillError:
    return DraftmillError(
        f"config: initial_layers names layers of the target that are not like a drafter's ({what}); leave it "
        "out to start from random weights."
    )
