"""What the gate compares: stored states against the model's own unpadded forward passes."""

from pathlib import Path
from statistics import median

import torch
from torch import nn

from draftmill import shard_layout
from draftmill.dtype_policy import Ledger
from draftmill.errors import DraftmillError
from draftmill.layer_inputs import picked_rows
from draftmill.shard_reader import Shard


class Tally:
    """Compares the rows of one shard; `checked` gives the figures or stops."""

    def __init__(self, path: Path, ledger: Ledger):
        self.path, self.ledger = path, ledger
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
        for name, layer in columns.items():
            self.ledger.expect("hidden states as read", found[name].dtype, shard.dtype)
            if layer not in own["states"]:
                raise DraftmillError(
                    f"{self.path}: what follows the output of layer {layer} does not run on text alone, so "
                    "it cannot be compared; name other layers in hidden_states.captures."
                )
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
        states = found[shard_layout.LAST][None, rows].to(head.lm_head.weight.device)
        self.equal += int((head(states)[0].argmax(-1).cpu() == own["argmax"]).sum())
        self.total += len(rows)

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
