"""The gate after extraction: what is stored gives the model's own next tokens."""

import json
import os
import shutil

import pytest
import torch

import extract_hidden_states
from draftmill.capture import Capture
from draftmill.errors import DraftmillError
from draftmill.target_structure import final_norm
from mini_road import MiniRoad, road_of, write_data
from workflow import rows


@pytest.fixture
def with_states(config, prepared_target) -> MiniRoad:
    road = road_of(config, prepared_target)
    road.to_states("judge")
    return road


def test_sound_states_pass_and_their_figures_are_written(with_states):
    found = json.loads(with_states.gate_hidden_states("judge").read_text())
    assert found["agreement"] >= 0.98
    assert found["greedy"] >= 0.95
    assert found["samples"] == 3
    assert found["record"]["dtypes"]["hidden states as read"] == "bfloat16"


def test_a_truncated_shard_is_named(with_states):
    path = with_states.states("judge")
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DraftmillError, match=r"judge/00000\.parquet: truncated"):
        with_states.gate_hidden_states("judge")
    assert not (with_states.root / "gates").exists()


def test_a_flipped_bit_in_a_shard_is_named(with_states):
    path = with_states.states("judge")
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)
    with pytest.raises(DraftmillError, match=r"judge/00000\.parquet: damaged"):
        with_states.gate_hidden_states("judge")


def test_a_flipped_bit_in_the_targets_head_is_named(with_states):
    content = bytearray(with_states.head.read_bytes())
    content[-5] ^= 1
    with_states.head.write_bytes(content)
    with pytest.raises(DraftmillError, match=r"head\.safetensors: damaged.*checksum"):
        with_states.gate_hidden_states("judge")


def stored_by(monkeypatch, road: MiniRoad, change) -> None:
    """Extracts again with a capture whose states are changed: [layers..., last] -> the same."""

    class Changed(Capture):
        def __init__(self, model, layers):
            super().__init__(model, layers)
            self.norm = final_norm(model)

        def __call__(self, ids, mask):
            return change(self, super().__call__(ids, mask))

    monkeypatch.setattr(extract_hidden_states, "Capture", Changed)
    road.extract_hidden_states("judge")


@pytest.fixture
def uneven_norm(config, tiny_target, tmp_path):
    """A target whose final norm weighs its channels unevenly, as real ones do."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "uneven"
    shutil.copytree(tiny_target, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.linspace(0.2, 4, 64).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config["target"]["path"] = str(folder)
    road = MiniRoad(config)
    road.prepare_target()
    road.to_states("judge")
    return road


def test_states_stored_after_the_norm_fail(uneven_norm, monkeypatch):
    def post_norm(capture, states):
        return [*states[:-1], capture.norm(states[-1])]

    uneven_norm.gate_hidden_states("judge")
    stored_by(monkeypatch, uneven_norm, post_norm)
    with pytest.raises(DraftmillError, match="usual causes are states stored after the final"):
        uneven_norm.gate_hidden_states("judge")


def test_the_last_state_of_a_layer_below_fails(with_states, monkeypatch):
    stored_by(monkeypatch, with_states, lambda capture, states: [*states[:-1], states[-2]])
    with pytest.raises(DraftmillError, match="a layer off by one"):
        with_states.gate_hidden_states("judge")


def test_states_that_are_not_finite_fail(with_states, monkeypatch):
    def overflown(capture, states):
        states[1] = states[1].clone()
        states[1][0, 2, 5] = float("nan")
        return states

    stored_by(monkeypatch, with_states, overflown)
    with pytest.raises(DraftmillError, match=r"output_of_2 of sample 0 .* not finite"):
        with_states.gate_hidden_states("judge")


def test_text_that_the_target_would_not_emit_fails_for_a_test_source(config, prepared_target):
    answers = [
        r | {"response": "an answer from somewhere else, not the target's"} for r in rows(3, 600)
    ]
    write_data(rows(6), rows(3, 500), answers)
    config["sources"]["judge"]["responses"] = "given"
    road = road_of(config, prepared_target)
    road.to_states("judge")
    with pytest.raises(DraftmillError, match="what the target would emit greedily"):
        road.gate_hidden_states("judge")
    config["sources"]["judge"]["role"] = "train"
    config["sources"]["learn"]["role"] = "test"
    road = MiniRoad(config)
    road.to_states("judge")
    assert json.loads(road.gate_hidden_states("judge").read_text())["greedy"] is None


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("off", [-1, 1])
def test_the_states_of_a_neighbouring_layer_fail(with_states, monkeypatch, column, off):
    """The drafter would read another layer than serving gives it; the next tokens alone do not show it."""

    class OffByOne(Capture):
        def __init__(self, model, layers):
            super().__init__(
                model, [max(0, n + off) if i == column else n for i, n in enumerate(layers)]
            )

    if with_states.plan.config["hidden_states"]["captures"]["low"]["output_of"][column] + off < 0:
        pytest.skip("there is no layer below the first")
    monkeypatch.setattr(extract_hidden_states, "Capture", OffByOne)
    with_states.extract_hidden_states("judge")
    with pytest.raises(DraftmillError, match=r"output_of_\d is nearer .* a layer off by one"):
        with_states.gate_hidden_states("judge")
