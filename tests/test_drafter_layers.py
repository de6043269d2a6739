"""The decoder layers of a drafter for every target family: what is saved of them is what they compute."""

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import families
from draftmill import dflash, eagle3, rotary
from draftmill.drafter_layers import drafter_layers
from draftmill.target_config import config_of, text_config

KINDS = {
    "llama": (LlamaConfig, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3RotaryEmbedding),
}
POSITIONS = torch.arange(300)[None]
STATES = torch.zeros(1, 300, 8)


def manifest(folder) -> dict:
    return {"checkpoint": str(folder), "trust_remote_code": False, "name": "a"}


def angles(config, kind: str) -> torch.Tensor:
    return torch.stack(KINDS[kind][1](config)(STATES, POSITIONS))


@pytest.mark.parametrize("name", families.NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_for_every_family_saves_the_angles_that_it_computes(name, kind, family, tmp_path):
    made = drafter_layers(manifest(family(name)), 2, kind)
    assert set(made.rope_parameters) <= rotary.ROPE_KEYS | {"rope_type"}
    made.save_pretrained(tmp_path)
    again = KINDS[kind][0].from_pretrained(tmp_path)
    assert again.rope_parameters == made.rope_parameters
    assert torch.equal(angles(again, kind), angles(made, kind))
    assert angles(made, kind).shape[-1] == made.head_dim, "the whole head is turned"


@pytest.mark.parametrize("name", families.NAMES)
def test_a_block_drafter_is_built_for_every_family(name, family):
    settings = {"num_layers": 2, "sliding_window": None, "block_size": 4, "mask_token_id": 3}
    settings |= {"layers": {"output_of": [0, 2]}}
    config = dflash.config_of(settings, manifest(family(name)), "cpu", 64)
    with torch.device("meta"):
        model = dflash.empty(config)
    assert config.transformer_layer_config.layer_types == ["full_attention"] * 2
    assert model.sliding_window_indices == []


def test_multimodal_sections_and_partial_angles_are_left_out(family):
    target = text_config(config_of(manifest(family("qwen3_5")))).rope_parameters
    assert target["mrope_section"]
    assert target["partial_rotary_factor"] == 0.5
    made = drafter_layers(manifest(family("qwen3_5")), 2, "qwen3").rope_parameters
    assert made == {"rope_type": "default", "rope_theta": target["rope_theta"]}


def test_stretched_angles_are_kept(family):
    target = text_config(config_of(manifest(family("kimi_k25")))).rope_parameters
    made = drafter_layers(manifest(family("kimi_k25")), 2, "qwen3").rope_parameters
    assert made["rope_type"] == "yarn"
    assert made == {key: target[key] for key in made}


@pytest.mark.parametrize(
    "target",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    ],
)
def test_angles_that_a_drafter_cannot_have_become_plain_ones(target):
    assert rotary.plain(target | {"rope_theta": 50000}) == {
        "rope_type": "default",
        "rope_theta": 50000.0,
    }


def test_a_target_without_rotary_angles_gives_the_usual_ones():
    assert rotary.plain(None) == {"rope_type": "default", "rope_theta": 10000.0}


def test_the_name_of_a_target_is_never_looked_up(family, monkeypatch):
    """A model's name may be that of a repository, and building a drafter asks nobody for it."""
    settings = {"num_layers": 1, "sliding_window": None, "block_size": 4, "mask_token_id": 3}
    settings |= {
        "layers": {"output_of": [0]},
        "norm_before_residual": True,
        "norm_before_fc": False,
    }
    folder = family("qwen3")
    for module in (dflash, eagle3):
        config = module.config_of(settings | {"ttt_steps": 2}, manifest(folder), "cpu", 64)
        with monkeypatch.context() as patched:
            patched.setattr("transformers.AutoConfig.from_pretrained", lambda *a, **k: 1 / 0)
            with torch.device("meta"):
                module.empty(config)
        assert config.speculators_config.verifier.name_or_path == "a"
