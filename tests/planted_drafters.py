"""Faults of a drafter: its configuration, layers, vocabulary, angles and frozen parts."""

from collections.abc import Callable

import torch

from draftmill import drafter_training, state_dataset, target_head, tensor_files
from planted_steps import ALGORITHMS


def edited(name: str, drafter: str, edit: Callable) -> Callable:
    """What the algorithm's function of this name makes is changed afterwards."""

    def plant(patch) -> None:
        real = getattr(ALGORITHMS[drafter], name)

        def wrong(*arguments):
            made = real(*arguments)
            edit(made)
            return made

        patch.setattr(ALGORITHMS[drafter], name, wrong)

    return plant


def new_drafter(drafter: str, edit: Callable) -> Callable:
    return edited("new_drafter", drafter, edit)


def config_of(drafter: str, edit: Callable) -> Callable:
    return edited("config_of", drafter, edit)


def layer_ids(config) -> None:
    name = "aux_hidden_state_layer_ids"
    name = name if hasattr(config, name) else f"eagle_{name}"
    setattr(config, name, [i - 1 for i in getattr(config, name)])


def rope(**parameters) -> Callable:
    def edit(config) -> None:
        layers = config.transformer_layer_config
        layers.rope_parameters = layers.rope_parameters | parameters

    return edit


def rounded_frequencies(model) -> None:
    model.rotary_emb.inv_freq = model.rotary_emb.inv_freq.bfloat16().float()


def sliding(window: int) -> Callable:
    def edit(config) -> None:
        layers = config.transformer_layer_config
        layers.layer_types = ["sliding_attention"] * layers.num_hidden_layers
        layers.sliding_window = window

    return edit


def short_window(model) -> None:
    """One layer slides, though the configuration says nothing of it."""
    model.sliding_window_indices, model.sliding_window = [len(model.layers) - 1], 8
    model.uses_sliding_window_attn = True


def maps(change: Callable) -> Callable:
    def edit(model) -> None:
        model.d2t = change(model.d2t)

    return edit


def absolute(d2t):
    return d2t + torch.arange(len(d2t))


def trained_embedding(model) -> None:
    model.embed_tokens.weight.requires_grad_(True)


def loud(model) -> None:
    """Its logits are ten times too large."""
    model.norm.weight.data.mul_(10)


def other_head(model) -> None:
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))


def other_targets_file(patch) -> None:
    """head.safetensors of another target under this one's fingerprint."""
    real = tensor_files.read

    def wrong(path):
        tensors, record = real(path)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)
        return tensors, record

    patch.setattr(tensor_files, "read", wrong)
    patch.setattr(target_head.tensor_files, "read", wrong)


def final_layer(drafter: str) -> Callable:
    """The last of the drafter's layers is the target's, and nobody else looks (layers.py does)."""
    layers = {"small": 4, "block": 3}[drafter]

    def plant(patch) -> None:
        real = drafter_training.read_manifest
        patch.setattr(drafter_training, "check_layers", lambda *arguments: None)
        patch.setattr(
            drafter_training, "read_manifest", lambda path: real(path) | {"layers": layers}
        )

    return plant


def last_among_the_states(patch) -> None:
    real = state_dataset.StateDataset.__getitem__

    def wrong(self, index):
        sample = real(self, index)
        hidden = sample["last"].shape[1]
        return sample | {"aux": torch.cat([sample["aux"][:, hidden:], sample["last"]], -1)}

    patch.setattr(state_dataset.StateDataset, "__getitem__", wrong)
