"""What a config.json asks of a forward pass, beside the model itself, changes no state."""

import json

import pytest

from mini_road import MiniRoad

FLAGS = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "output_router_logits": True,
    "use_cache": False,
    "attention_dropout": 0.5,
    "gradient_checkpointing": True,
}


def stored_by(road: MiniRoad) -> bytes:
    road.prepare_target()
    for step in ("prepare_prompts", "generate_responses", "tokenize_conversations"):
        getattr(road, step)("judge")
    road.extract_hidden_states("judge")
    assert json.loads(road.gate_hidden_states("judge").read_text())["greedy"] >= 0.95
    # the footer holds the fingerprint of the target, which knows its files
    return road.states("judge").read_bytes()[:10_000]


@pytest.mark.parametrize("family_name", ["llama", "qwen3_5", "gpt_oss"])
def test_flags_of_a_forward_pass_change_no_state(edited, family_name):
    checkpoint = edited(family_name)
    plain = stored_by(checkpoint.road())

    def change(config: dict) -> None:
        for place in (config, config.get("text_config", {})):
            place |= FLAGS

    assert stored_by(checkpoint.config(change).road()) == plain
