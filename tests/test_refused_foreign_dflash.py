"""DFlash checkpoints that speculators' model cannot represent, or that belong to another target."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import import_drafter
from draftmill.errors import DraftmillError
from foreign_checkpoints import (
    YARN,
    Checkpoint,
    Target,
    dflash_checkpoint,
    with_config,
    with_dflash,
    with_windows,
    without,
    written,
)


@pytest.fixture
def target(foreign_target) -> Target:
    return foreign_target


@pytest.fixture
def made(target, tmp_path) -> Callable[..., Path]:
    """(change, layout of the files, options of the builder) -> the folder of a checkpoint."""
    return partial(written, dflash_checkpoint, target, tmp_path / "published")


def added(name: str, *shape: int) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.tensors.update({name: torch.ones(shape)})


def not_finite(checkpoint: Checkpoint) -> None:
    checkpoint.tensors["fc.weight"][0, 0] = torch.nan


REFUSED = {
    "a scaled embedding": (with_dflash(input_embedding_scale=2.0), "input_embedding_scale is 2.0"),
    "scaled logits": (with_config(output_multiplier=0.5), "output_multiplier is 0.5"),
    "capped logits": (with_dflash(final_logit_softcapping=30.0), "final_logit_softcapping is 30.0"),
    "a key of nobody": (with_config(is_neox_style=False), "is_neox_style is False"),
    "a key in dflash_config": (with_dflash(selector_rank=8), "dflash_config.selector_rank is 8"),
    "quantised weights": (with_config(quantization_config={"bits": 8}), "quantization_config is"),
    "DFlash-2": (with_config(architectures=["DFlash2DraftModel"]), "is a DFlash2DraftModel, but"),
    "another decoder": (with_config(model_type="llama"), "model_type is 'llama', expected 'qwen3'"),
    "gated attention": (added("layers.0.self_attn.g_proj.weight", 4, 64), "g_proj.weight is "),
    "fused attention": (added("layers.0.self_attn.qkv_proj.weight", 192, 64), "qkv_proj.weight is"),
    "a missing weight": (without("layers.1.mlp.up_proj.weight"), "up_proj.weight is missing"),
    "a narrow fc": (
        with_dflash(target_layer_ids=[0, 2]),
        r"reads output_of \[0, 2\], but the conf",
    ),
    "unsorted layers": (with_dflash(target_layer_ids=[2, 0, 3]), "distinct layers in ascending"),
    "the final layer": (with_dflash(target_layer_ids=[0, 2, 5]), "reads output_of 5, the target's"),
    "a layer too high": (with_dflash(target_layer_ids=[0, 2, 6]), "but the target has 6 decoder"),
    "a deeper target": (with_config(num_target_layers=8), "with layers 8, but tiny has 6"),
    "a wider target": (with_config(hidden_size=128), "with hidden_size 128, but tiny has 64"),
    "another vocabulary": (with_config(vocab_size=640), "with vocab_size 640, but tiny has 512"),
    "no mask token": (with_dflash(mask_token_id=None), "mask_token_id is None, expected the id"),
    "a high mask token": (with_dflash(mask_token_id=512), "mask_token_id is 512, expected the id"),
    "no rotary base": (with_config(rope_theta=None), "names no rope_theta"),
    "angles by length": (
        with_config(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "its rotary angles are 'dynamic'",
    ),
    "partial angles": (with_config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "partial angles within": (
        with_config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "rope_parameters.partial_rotary_factor is 0.5",
    ),
    "two kinds of angles": (
        with_config(rope_scaling=YARN, rope_parameters={"rope_theta": 1e4}),
        "contradict one another",
    ),
    "windows without a width": (
        with_config(layer_types=["sliding_attention"] * 2),
        "the window is None",
    ),
    "a window below the block": (
        with_windows("sliding", "sliding", block_size=128),
        "at least the block's 128 tokens",
    ),
    "causal full attention": (with_config(is_causal=True), "is_causal is true with full_attention"),
    "a missing layer type": (with_config(layer_types=["full_attention"]), "cannot make decoder"),
    "another layer type": (
        with_config(layer_types=["full_attention", "chunked_attention"]),
        "layer_types are",
    ),
    "nonsense": (with_config(num_attention_heads="four"), "cannot make decoder layers of it"),
    "weights that are not finite": (not_finite, "fc.weight is not finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_lost_or_belongs_elsewhere_is_refused(target, made, case):
    change, sentence = REFUSED[case]
    folder = made(change)
    with pytest.raises(DraftmillError, match=sentence):
        target.imported("dflash", folder)
    assert not (folder.parent / "published-imported").exists()


def edited_export(folder: Path, **changes) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return folder


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"speculators_model_type": "dspark"}, "speculators_model_type is 'dspark', but"),
        ({"markov_rank": 4}, "markov_rank is 4"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128"),
        ({"sliding_window_non_causal": "absent"}, "does not say sliding_window_non_causal"),
        ({"transformer_layer_config": {}}, "names no model_type"),
        ({"aux_hidden_state_layer_ids": [1, 3, 6]}, "reads output_of 5, the target's final layer"),
        ({"aux_hidden_state_layer_ids": [0, 1, 3]}, "distinct layers in ascending"),
        ({"block_size": None}, "names no block_size"),
    ],
)
def test_a_file_in_speculators_format_is_held_to_the_same(target, made, changes, sentence):
    folder = target.imported("dflash", made(with_windows("sliding", "full")))
    with pytest.raises(DraftmillError, match=sentence):
        target.imported("dflash", edited_export(folder, **changes))


def test_a_head_with_a_bias_cannot_be_borrowed(target, made, monkeypatch):
    real = import_drafter.target_head.read
    monkeypatch.setattr(
        "import_drafter.target_head.read",
        lambda *arguments: real(*arguments) | {"lm_head.bias": torch.zeros(512)},
    )
    with pytest.raises(DraftmillError, match="borrows the target's head, which has a bias"):
        target.imported("dflash", made())
