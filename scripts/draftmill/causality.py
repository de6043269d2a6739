"""Whether a target's states depend on later tokens, which nothing in its files need tell."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from draftmill.errors import DraftmillError
from draftmill.layer_inputs import LayerInputs, picked_rows
from draftmill.shard_reader import Shard

FORESIGHT = 0.05  # relative; a causal model's states differ by rounding alone, 0.01 in bf16


def half_passes(
    watch: LayerInputs, shards: list[Shard], border: int | None
) -> list[Callable[[nn.Module], dict]]:
    """Two passes over the longest sample, its second half in sight or left out; none without a sample.

    border: the target's angle_border; both passes stay on one side of it.
    """
    places = [(shard, i) for shard in shards for i in range(len(shard.samples))]
    if not places:
        return []
    shard, index = max(places, key=lambda place: place[0].samples[place[1]]["tokens"])
    tokens = shard.samples[index]["tokens"]
    half = max(1, tokens // 2)
    if border is not None and half <= border < tokens:
        half = border + 1
    return [partial(half_pass, watch, shard, index, half, end) for end in (tokens, half)]


def half_pass(
    watch: LayerInputs, shard: Shard, index: int, half: int, end: int, model: nn.Module
) -> dict:
    """The rows of a sample's first `half` tokens, of a pass over the first `end`."""
    ids = shard.read(index, ["input_ids"])["input_ids"][None, :end]
    return watch(model, ids.to(model.get_input_embeddings().weight.device), picked_rows(half))


def check_causal(target: Path, whole: dict, half: dict) -> None:
    """Refuses a model whose states depend on later tokens: nothing could be drafted for it.

    target: its manifest. Raises DraftmillError.
    """
    one, other = (found["states"][found["last"]] for found in (whole, half))
    error = (one - other).norm(dim=-1) / one.norm(dim=-1).clamp_min(1e-9)
    if error.median() > FORESIGHT:
        raise DraftmillError(
            f"{target}: the last states of a sample's first half change by {error.median():.1%} in the median "
            f"when its second half is left out (expected at most {FORESIGHT:.0%}), so the target's attention "
            "sees the future; take a causal language model as the target."
        )
