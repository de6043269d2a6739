"""The figures of measure_acceptance: a plain loop's, step for step, or a refusal."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import reference_loop
from draftmill import eagle3
from draftmill.errors import DraftmillError
from mini_road import MiniRoad, write_data
from workflow import rows

PROMPTS = 20


@pytest.fixture
def exact(config) -> MiniRoad:
    """The tiny road in float32, stored states included, with 20 test prompts and a drafter that is often
    right on them."""
    write_data(rows(20, 600), rows(3, 500), rows(PROMPTS, 600))
    config["target"]["dtype"] = "float32"
    config["sources"]["judge"]["shard_size"] = PROMPTS
    config["sources"]["learn"]["shard_size"] = 20
    training = config["drafters"]["small"]["training"]
    training |= {"steps": 60, "tokens_per_batch": 512, "learning_rate": 4e-3, "validate_every": 60}
    road = MiniRoad(config)
    road.prepare_target()
    for source in ("learn", "choose", "judge"):
        road.to_states(source)
    road.build_draft_vocab()
    road.train()
    return road


def test_on_twenty_prompts_every_step_is_that_of_the_plain_loop(exact):
    found = json.loads(exact.measure_acceptance("judge").read_text())
    manifest = json.loads(exact.target.read_text())
    target = LlamaForCausalLM.from_pretrained(manifest["checkpoint"], dtype=torch.float32).eval()
    drafter = eagle3.load(exact.root / "drafters/small", "cpu")
    layers = exact.plan.config["hidden_states"]["captures"]["low"]["output_of"]
    from draftmill import tables

    answers = {r["row"]: r for r in tables.read(exact.table("responses", "judge"))}
    assert len(found["per_response"]) == PROMPTS
    seen = set()
    for response in found["per_response"]:
        answer = answers[response["row"]]
        text, emitted = reference_loop.speculate(
            target, drafter, layers, answer["prompt_ids"], 24, {2}, 3
        )
        assert text == answer["response_ids"]
        assert response["emitted"] == emitted
        seen |= set(emitted)
    assert seen == {1, 2, 3, 4}, "drafts of every length must occur"


@pytest.fixture
def road(ready_road) -> MiniRoad:
    ready_road.train()
    return ready_road


def test_a_checkpoint_edited_by_hand_is_named(road):
    path = road.root / "drafters/small/model.safetensors"
    tensors = load_file(path)
    tensors["fc.weight"] = tensors["fc.weight"] * 2
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(DraftmillError, match=r"model\.safetensors: was edited after it was made"):
        road.measure_acceptance("judge")


def test_a_damaged_checkpoint_is_named(road):
    path = road.root / "drafters/small/model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DraftmillError, match=r"model\.safetensors: damaged"):
        road.measure_acceptance("judge")


def test_a_drafter_of_other_layers_is_refused(road):
    path = road.root / "drafters/small/run.json"
    run = json.loads(path.read_text())
    run["layers"]["output_of"] = [0, 1, 2]
    path.write_text(json.dumps(run))
    with pytest.raises(DraftmillError, match=r"holds output_of \[0, 2, 3\], but the drafter"):
        road.measure_acceptance("judge")


def test_a_drafter_trained_on_another_rendering_is_refused(road):
    path = road.root / "drafters/small/run.json"
    run = json.loads(path.read_text())
    run["rendering"]["chat_template_kwargs"] = {"enable_thinking": True}
    path.write_text(json.dumps(run))
    with pytest.raises(DraftmillError, match="training and evaluation must agree"):
        road.measure_acceptance("judge")


def test_conditions_and_drafters_stand_beside_the_figures(road):
    found = json.loads(road.measure_acceptance("judge").read_text())
    assert found["conditions"]["draft_tokens"] == 3
    assert found["conditions"]["max_new_tokens"] == 24
    assert found["conditions"]["temperature"] == 0
    assert found["drafter"]["seed"] == 0
    assert 0 <= found["repetition"] <= 1
    assert 0 <= found["out_of_draft_vocab"] <= 1
