"""A sample's stored states are those of the sample alone, whatever it was batched with."""

import json

import pytest
import torch

import extract_hidden_states
from draftmill import target_model
from draftmill.capture import Capture
from draftmill.dtype_policy import Ledger
from draftmill.errors import DraftmillError
from draftmill.length_buckets import batches_of
from draftmill.shard_reader import Shard
from draftmill.target_manifest import read_manifest
from mini_road import MiniRoad, manifest_of, write_data
from tiny_target import make_target
from workflow import rows, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values")
# sinks, windows, chunks, shared keys, recurrent states, convolutions, latent attention, experts
FAMILIES = ("gemma3", "gemma4", "gpt_oss", "granite", "kimi_k25", "llama4", "mistral3", "qwen3_5")
BORDER = 52
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [float(1 + i) for i in range(8)],
    "original_max_position_embeddings": BORDER,
    "factor": 8.0,
}


def road_to(target, dtype: str, count: int = 6) -> MiniRoad:
    """The road of a target up to its training source's tokens, which are padded."""
    write_data(rows(count), rows(2, 500), rows(2, 600))
    config = tiny_config(target)
    config["target"]["dtype"] = dtype
    road = MiniRoad(config)
    road.prepare_target()
    for step in ("prepare_prompts", "generate_responses", "tokenize_conversations"):
        getattr(road, step)("learn")
    return road


def largest_error(road: MiniRoad) -> float:
    """Of all stored states, relative to those of an unpadded pass of their sample."""
    manifest = read_manifest(road.target)
    model = target_model.load(manifest, manifest["dtype"], Ledger())
    shard = Shard(road.states("learn"), manifest["dtype"])
    capture = Capture(model, shard.layers)
    columns = [f"output_of_{layer}" for layer in shard.layers] + ["last"]
    errors = []
    for index in range(len(shard.samples)):
        found = shard.read(index, ["input_ids", *columns])
        with torch.inference_mode():
            own = capture(found["input_ids"][None], None)
        for column, state in zip(columns, own, strict=True):
            error = (found[column] - state[0]).norm(dim=-1) / state[0].norm(dim=-1)
            errors.append(float(error.max()))
    return max(errors)


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_changes_no_state(family, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    road = road_to(family(name), "float32")
    road.extract_hidden_states("learn")
    assert len({sample["tokens"] for sample in Shard(road.states("learn"), "float32").samples}) > 2
    assert largest_error(road) < 1e-4


@pytest.fixture
def longrope(tmp_path, monkeypatch) -> MiniRoad:
    """The road of a target that turns to other rotary angles for sequences above BORDER."""
    monkeypatch.chdir(tmp_path)
    return road_to(make_target(tmp_path / "target", rope_parameters=LONGROPE), "float32")


def test_no_sample_is_padded_into_other_rotary_angles(longrope):
    assert manifest_of(longrope)["angle_border"] == BORDER
    longrope.extract_hidden_states("learn")
    lengths = [s["tokens"] for s in Shard(longrope.states("learn"), "float32").samples]
    assert min(lengths) < BORDER < max(lengths)
    assert largest_error(longrope) < 1e-4


def test_the_gate_does_not_take_other_rotary_angles_for_a_look_into_the_future(longrope):
    longrope.extract_hidden_states("learn")
    assert json.loads(longrope.gate_hidden_states("learn").read_text())["agreement"] == 1


def test_the_gate_names_a_sample_that_was_padded_into_other_rotary_angles(longrope, monkeypatch):
    """As it was when nothing knew of the border: one short sample among long ones."""

    def across(items, tokens, padding, border):
        return batches_of(items, tokens, padding)

    monkeypatch.setattr(extract_hidden_states, "batches_of", across)
    longrope.extract_hidden_states("learn")
    assert largest_error(longrope) > 0.1
    with pytest.raises(DraftmillError, match=r"learn/00000\.parquet: "):
        longrope.gate_hidden_states("learn")


def test_one_sample_that_depends_on_its_batch_fails_the_gate(config, tiny_target, monkeypatch):
    """The figures over all rows hide it: a norm takes out the scale, and the median is that of the others."""

    class PaddingMatters(Capture):
        def __call__(self, ids, mask):
            states = super().__call__(ids, mask)
            if mask is not None:
                for state in states:
                    state[0] *= 1.5
            return states

    road = road_to(tiny_target, "bfloat16", count=10)
    monkeypatch.setattr(extract_hidden_states, "Capture", PaddingMatters)
    road.extract_hidden_states("learn")
    with pytest.raises(
        DraftmillError, match=r"of sample 0 differs .* padding that the target does not"
    ):
        road.gate_hidden_states("learn")


@pytest.mark.parametrize("batch_tokens", [1, 64, 1000])
def test_batches_stay_on_one_side_of_a_border(batch_tokens):
    items = [{"input_ids": [0] * n, "row": n, "turn": 0} for n in range(1, 30)]
    batches = list(batches_of(items, batch_tokens, "right", 10))
    assert sorted(len(r["input_ids"]) for batch in batches for r in batch) == list(range(1, 30))
    for batch in batches:
        assert len({len(row["input_ids"]) > 10 for row in batch}) == 1
