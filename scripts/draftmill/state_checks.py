"""What the gate compares: stored states against the model's own unpadded forward passes."""

import inspect
import random
from contextvars import ContextVar
from pathlib import Path
from statistics import median

import torch
from torch import nn

from draftmill import shard_layout
from draftmill.errors import DraftmillError
from draftmill.shard_reader import Shard
from draftmill.target_structure import decoder_layers, final_norm, output_head

NEAR_TIE_ULPS = 2  # units in the last place of the highest logit
ROWS_PER_SAMPLE = 16  # positions compared in one sample, so that the rows spread over several
_watched: ContextVar[tuple[torch.Tensor, dict]] = ContextVar("rows and inputs of the running pass")


def check_contents(shard: Shard, rows: list[dict]) -> None:
    """Every state finite, every id and mask equal to the tokens'."""
    expected = {(row["row"], row["turn"]): row for row in rows}
    columns = shard.file.schema_arrow.names
    for index, sample in enumerate(shard.samples):
        row = expected.pop((sample["row"], sample["turn"]), None)
        found = shard.read(index, columns)
        ids, mask = found.pop("input_ids").tolist(), found.pop("loss_mask").long().tolist()
        if row is None or ids != row["input_ids"] or mask != row["loss_mask"]:
            raise DraftmillError(
                f"{shard.path}: sample {index} (row {sample['row'] + 1}) does not hold the ids and "
                "mask of its tokens; delete it and start Snakemake again."
            )
        for name, state in found.items():
            if not torch.isfinite(state).all():
                raise DraftmillError(
                    f"{shard.path}: {name} of sample {index} (row {sample['row'] + 1}) holds values "
                    "that are not finite; the target overflowed in this dtype or its weights are "
                    "damaged."
                )
    if expected:
        raise DraftmillError(f"{shard.path}: lacks {len(expected)} samples of its tokens.")


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
        for i in sorted(around):
            modules[i].register_forward_pre_hook(self._hook(i - 1), with_kwargs=True)

    def _hook(self, layer: int):
        def hook(module, args, kwargs) -> None:
            rows, found = _watched.get()
            state = args[0] if args else kwargs["hidden_states"]
            found[layer] = state[0, rows].float().cpu()

        return hook

    def __call__(self, model: nn.Module, ids: torch.Tensor, rows: torch.Tensor) -> dict:
        """The model's own argmax at `rows` of ids [1, tokens], and output_of -> states there (float32
        [rows, hidden]); layer -1 is the embedding's output."""
        found: dict[int, torch.Tensor] = {}
        token = _watched.set((rows, found))
        # no [tokens, vocab] logits where the family can leave them out; indices on the CPU suit any device
        spared = "logits_to_keep" in inspect.signature(model.forward).parameters
        options = {"logits_to_keep": rows} if spared else {}
        try:
            logits = model(input_ids=ids, use_cache=False, **options).logits[0]
        finally:
            _watched.reset(token)
        argmax = (logits if spared else logits[rows]).argmax(-1).cpu()
        return {"argmax": argmax, "states": found, "last": self.last}


def own_pass(watch: LayerInputs, shard: Shard, index: int, model: nn.Module) -> dict:
    """One sample through the whole model, unpadded."""
    ids = shard.read(index, ["input_ids"])["input_ids"][None]
    rows = picked_rows(ids.shape[1])
    return watch(model, ids.to(model.get_input_embeddings().weight.device), rows)


def check_loaded(model: nn.Module, tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Refuses a model whose embedding, norm or head is not the checkpoint's after loading.

    tensors: of head.safetensors at `path`. Raises DraftmillError.
    """
    modules = {
        "embed_tokens": model.get_input_embeddings(),
        "norm": final_norm(model),
        "lm_head": output_head(model),
    }
    for role, module in modules.items():
        for name, weight in module.named_parameters():
            stored = tensors.get(f"{role}.{name}")
            if stored is not None and not torch.equal(weight.to(stored.dtype).cpu(), stored):
                raise DraftmillError(
                    f"{path}: {role}.{name} of the checkpoint is not what the loaded model has; transformers "
                    "changes it while loading, so drafts would be scored against another head; this "
                    "family is not supported."
                )


class Tally:
    """Compares the rows of one shard; `checked` gives the figures or stops."""

    def __init__(self, path: Path):
        self.path = path
        self.equal = self.total = 0
        self.errors: dict[str, list[float]] = {}
        self.nearest: dict[str, int] = {}
        self.worst = (0.0, 0, "")  # the sample whose median error is the largest

    @torch.inference_mode()
    def add(self, shard: Shard, index: int, own: dict, head: nn.Module) -> None:
        columns = {shard_layout.column_of(layer): layer for layer in shard.layers}
        columns |= {shard_layout.LAST: own["last"]}
        found = shard.read(index, ["input_ids", *columns])
        rows = picked_rows(len(found["input_ids"]))
        states = found[shard_layout.LAST][None, rows].to(head.lm_head.weight.device)
        self.equal += int((head(states)[0].argmax(-1).cpu() == own["argmax"]).sum())
        self.total += len(rows)
        for name, layer in columns.items():
            stored = found[name][rows].float()
            distance = {
                other: (stored - own["states"][other]).norm(dim=-1)
                for other in (layer - 1, layer, layer + 1)
                if other in own["states"]
            }
            error = distance[layer] / own["states"][layer].norm(dim=-1).clamp_min(1e-9)
            self.errors.setdefault(name, []).extend(error.tolist())
            self.worst = max(self.worst, (float(error.median()), index, name))
            closest = torch.stack(list(distance.values())).amin(0)
            self.nearest[name] = self.nearest.get(name, 0) + int((distance[layer] <= closest).sum())

    def checked(self, settings: dict) -> dict:
        """Raises DraftmillError below the thresholds of hidden_states.gate."""
        if not self.total:
            return {"agreement": None, "rows": 0, "states": {}}
        wanted, limit = settings["min_agreement"], settings["max_state_error"]
        agreement = self.equal / self.total
        if agreement < wanted:
            raise DraftmillError(
                f"{self.path}: on {self.total} rows, the head on the stored states agrees with the model's "
                f"own argmax in {agreement:.1%}, expected at least {wanted:.1%}; the usual causes are "
                "states stored after the final norm, a layer off by one, padding on the left, or another "
                "target."
            )
        for name, errors in self.errors.items():
            share, error = self.nearest[name] / self.total, median(errors)
            if share < wanted or error > limit:
                raise DraftmillError(
                    f"{self.path}: {name} is nearer to the model's own output of that layer than to its "
                    f"neighbours' in {share:.1%} of {self.total} rows (expected {wanted:.1%}) and differs "
                    f"from it by {error:.1%} in the median (expected at most {limit:.1%}); the usual causes "
                    "are a layer off by one, states stored after the final norm, padding on the left, or "
                    "another target."
                )
        error, sample, name = self.worst
        if error > limit:
            raise DraftmillError(
                f"{self.path}: {name} of sample {sample} differs from the model's own by {error:.1%} in the median "
                f"(expected at most {limit:.1%}), while most samples do not; the usual cause is padding that the "
                "target does not ignore, so that a sample's states depend on its batch; set "
                "hidden_states.batch_tokens to 1, and nothing is padded."
            )
        states = {name: median(errors) for name, errors in self.errors.items()}
        return {"agreement": agreement, "rows": self.total, "states": states}


@torch.inference_mode()
def greedy_share(shard: Shard, head: nn.Module) -> float | None:
    """The share of answer tokens, the first excepted, that are the argmax before them, or so near to it that
    the dtype's rounding decides between a cached and a full pass."""
    equal = total = 0
    for index, sample in enumerate(shard.samples):
        found = shard.read(index, ["input_ids", shard_layout.LAST])
        states = found[shard_layout.LAST][None, sample["start"] : -1]
        expected = found["input_ids"][sample["start"] + 1 :]
        if len(expected):
            logits = head(states.to(head.lm_head.weight.device))[0]
            highest = logits.amax(-1).float()
            chosen = logits.gather(-1, expected.to(logits.device)[:, None])[:, 0].float()
            near = NEAR_TIE_ULPS * torch.finfo(logits.dtype).eps * highest.abs()
            equal += int((highest - chosen <= near).sum())
            total += len(expected)
    return equal / total if total else None
