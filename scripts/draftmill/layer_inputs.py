"""The model's own states at picked rows of picked samples: what enters its layers in an unpadded pass."""

import inspect
import random
from contextvars import ContextVar

import torch
from torch import nn

from draftmill.shard_reader import Shard
from draftmill.target_structure import decoder_layers, final_norm

ROWS_PER_SAMPLE = 16  # positions compared in one sample, so that the rows spread over several
_watched: ContextVar[tuple[torch.Tensor, dict]] = ContextVar("rows and inputs of the running pass")


def picked_samples(shard: Shard, rows: int) -> list[int]:
    """Samples whose rows are compared, spread over the shard; among them the shortest, which was padded most."""
    order = list(range(len(shard.samples)))
    random.Random(0).shuffle(order)
    order.sort(key=lambda index: index > 0)  # a shard holds them by length
    return sorted(order[: -(-rows // ROWS_PER_SAMPLE)])


def picked_rows(tokens: int) -> torch.Tensor:
    return torch.linspace(0, tokens - 1, min(ROWS_PER_SAMPLE, tokens)).long()


class LayerInputs:
    """Watches what enters layers: the output of layer i is what enters layer i + 1, or the final norm.

    Another way to the same states than extraction's hooks on outputs, so that a hook on a wrong layer shows.
    """

    def __init__(self, model: nn.Module, layers: list[int]):
        modules = [*decoder_layers(model), final_norm(model)]
        self.last = len(modules) - 2
        around = {i + d for i in [*layers, self.last] for d in (0, 1, 2) if i + d < len(modules)}
        self._hooks = [
            modules[i].register_forward_pre_hook(self._hook(i - 1), with_kwargs=True)
            for i in sorted(around)
        ]

    def _hook(self, layer: int):
        def hook(module, args, kwargs) -> None:
            rows, found = _watched.get()
            state = args[0] if args else next(iter(kwargs.values()))
            found[layer] = state[0, rows].float().cpu()

        return hook

    def __call__(self, model: nn.Module, ids: torch.Tensor, rows: torch.Tensor) -> dict:
        """The model's own argmax at `rows` of ids [1, tokens], and output_of -> states there (float32
        [rows, hidden]); layer -1 is the embedding's output."""
        found: dict[int, torch.Tensor] = {}
        token = _watched.set((rows, found))
        # no [tokens, vocab] logits where the family can leave them out; a list, since accelerate moves a tensor
        # to the first GPU, and the last states may be on another
        spared = "logits_to_keep" in inspect.signature(model.forward).parameters
        options = {"logits_to_keep": rows.tolist()} if spared else {}
        try:
            logits = model(input_ids=ids, use_cache=False, **options).logits[0]
        finally:
            _watched.reset(token)
        argmax = (logits if spared else logits[rows]).argmax(-1).cpu()
        return {"argmax": argmax, "states": found, "last": self.last}

    def close(self) -> None:
        """Takes the hooks off the model."""
        for hook in self._hooks:
            hook.remove()


def own_pass(watch: LayerInputs, shard: Shard, index: int, model: nn.Module) -> dict:
    """One sample through the whole model, unpadded."""
    ids = shard.read(index, ["input_ids"])["input_ids"][None]
    rows = picked_rows(ids.shape[1])
    return watch(model, ids.to(model.get_input_embeddings().weight.device), rows)
