"""A target whose model code comes with it: run only where the configuration says so."""

import json
import sys

import pytest

import extract_hidden_states
from draftmill.errors import DraftmillError
from mini_road import MiniRoad

CONFIGURATION = """
from pathlib import Path
from transformers import LlamaConfig
Path({marker!r}).write_text("ran")
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_own_code(edited, tmp_path, monkeypatch):
    """A Llama under another model type, and the file that its code writes when it is imported."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr("sys.path", [*sys.path])
    checkpoint, marker = edited("llama"), tmp_path / "ran"
    text = CONFIGURATION.format(marker=str(marker))
    (checkpoint.folder / "configuration_own.py").write_text(text)
    (checkpoint.folder / "modeling_own.py").write_text(MODELING)

    def change(config: dict) -> None:
        config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"]}
        config["auto_map"] = {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        }

    return checkpoint.config(change), marker


def test_code_that_may_not_run_is_not_imported_and_the_sentence_says_how(with_own_code):
    checkpoint, marker = with_own_code
    sentence = checkpoint.refused()
    assert "config.json: transformers cannot read it" in sentence
    assert "read it, then set target.trust_remote_code: true" in sentence
    assert not marker.exists()


def test_a_model_type_that_transformers_knows_runs_no_code_of_the_checkpoint(with_own_code):
    checkpoint, marker = with_own_code
    checkpoint.config(lambda config: config.update(model_type="llama"))
    road = to_tokens(checkpoint.road())
    road.extract_hidden_states("judge")
    road.gate_hidden_states("judge")
    assert not marker.exists()


def to_tokens(road: MiniRoad) -> MiniRoad:
    road.prepare_target()
    for step in ("prepare_prompts", "generate_responses", "tokenize_conversations"):
        getattr(road, step)("judge")
    return road


def test_code_that_may_run_goes_through_extraction_by_both_backends_and_the_gate(with_own_code):
    checkpoint, marker = with_own_code
    road = to_tokens(checkpoint.road(trust_remote_code=True))
    assert marker.exists()
    stage = road.stage("extract_hidden_states", capture="low", source="judge", shard="00000")
    found = {}
    for backend in ("resident", "streamed"):
        shard = (stage, road.table("tokens", "judge"), road.states("judge"))
        extract_hidden_states.extract([shard], road.target, backend)
        found[backend] = road.states("judge").read_bytes()
        assert (
            json.loads(road.gate_hidden_states("judge", backend=backend).read_text())["agreement"]
            == 1
        )
    assert found["resident"] == found["streamed"]


def test_code_that_fails_is_one_sentence(with_own_code):
    checkpoint, _ = with_own_code
    (checkpoint.folder / "modeling_own.py").write_text("import module_that_is_nowhere\n")
    with pytest.raises(DraftmillError, match="module_that_is_nowhere"):
        checkpoint.road(trust_remote_code=True).prepare_target()


def test_code_of_another_repository_is_refused_since_no_revision_pins_it(with_own_code):
    checkpoint, marker = with_own_code

    def change(config: dict) -> None:
        config["auto_map"]["AutoModelForCausalLM"] = "other/model--modeling_own.OwnForCausalLM"

    sentence = checkpoint.config(change).refused(trust_remote_code=True)
    assert "code from another repository (other/model--modeling_own.OwnForCausalLM)" in sentence
    assert "no revision is pinned" in sentence
    assert not marker.exists()
