"""Families with other sizes, names and habits than Llama's: a drafter is shaped, or the refusal says why."""

from pathlib import Path

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    RwkvConfig,
    RwkvForCausalLM,
)

import extract_hidden_states
from draftmill.errors import DraftmillError
from mini_road import MiniRoad, write_data
from tiny_target import make_tokenizer
from workflow import rows, tiny_config

ENDS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 512}
FAMILIES = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_embd=64, n_layer=6, n_head=4, n_positions=512, **ENDS)),
    "falcon": (
        FalconForCausalLM,
        FalconConfig(
            hidden_size=64,
            num_hidden_layers=6,
            num_attention_heads=4,
            max_position_embeddings=512,
            **ENDS,
        ),
    ),
    "cohere": (
        CohereForCausalLM,
        CohereConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            **ENDS,
        ),
    ),
    "rwkv": (
        RwkvForCausalLM,
        RwkvConfig(
            hidden_size=64, num_hidden_layers=6, rescale_every=2, context_length=512, **ENDS
        ),
    ),
}


@pytest.fixture
def road(request, tmp_path, monkeypatch) -> MiniRoad:
    kind, config = FAMILIES[request.param]
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    folder = tmp_path / "target"
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    answers = [row | {"response": f"answer {i}, of some words"} for i, row in enumerate(rows(4))]
    write_data(answers, answers[:2], answers[2:])
    settings = tiny_config(Path(folder))
    settings["target"]["max_length"] = 256
    for source in settings["sources"].values():
        source |= {"role": "train", "responses": "given"}
    settings["sources"]["choose"]["role"] = "validation"
    settings["sources"]["judge"]["role"] = "test"
    made = MiniRoad(settings)
    made.prepare_target()
    for source in settings["sources"]:
        made.prepare_prompts(source)
        made.tokenize_conversations(source)
    return made


@pytest.mark.parametrize("road", ["gpt2", "falcon", "cohere"], indirect=True)
def test_a_drafter_is_trained_for_targets_without_llamas_names(road):
    for source in ("learn", "choose"):
        road.extract_hidden_states(source)
        road.index_hidden_states(source)
    road.build_draft_vocab()
    assert (road.train() / "model.safetensors").is_file()


@pytest.mark.parametrize("road", ["rwkv"], indirect=True)
def test_a_model_that_changes_itself_while_it_runs_is_not_streamed(road):
    """RWKV rescales its weights at its first pass and notes that it did: layers that come later would not be."""
    stage = road.stage("extract_hidden_states", capture="low", source="learn", shard="00000")
    shard = (stage, road.table("tokens", "learn"), road.states("learn"))
    with pytest.raises(DraftmillError, match=r"changes itself while it runs .*resident backend"):
        extract_hidden_states.extract([shard], road.target, "streamed")
    assert not road.states("learn").exists()
