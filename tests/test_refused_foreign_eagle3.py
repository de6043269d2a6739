"""EAGLE-3 checkpoints that speculators' model cannot represent, or that belong to another target."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from draftmill.errors import DraftmillError
from foreign_checkpoints import (
    HIDDEN,
    KEPT,
    Checkpoint,
    Target,
    biases,
    eagle3_checkpoint,
    remarks,
    with_config,
    without,
    written,
)


@pytest.fixture
def target(foreign_target) -> Target:
    return foreign_target


@pytest.fixture
def made(target, tmp_path) -> Callable[..., Path]:
    """(change, layout of the files, options of the builder) -> the folder of a checkpoint."""
    return partial(written, eagle3_checkpoint, target, tmp_path / "published")


def with_maps(**maps: torch.Tensor) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.tensors.update(maps)


def of_eagle_1(checkpoint: Checkpoint) -> None:
    checkpoint.tensors["fc.weight"] = checkpoint.tensors["fc.weight"][:, : 2 * HIDDEN]


REFUSED = {
    "absolute ids": (with_maps(d2t=torch.tensor(KEPT)), "d2t must hold offsets"),
    "zeros": (with_maps(d2t=torch.zeros(len(KEPT), dtype=torch.long)), "d2t must hold offsets"),
    "no d2t": (without("d2t"), "its weights lack d2t, but its draft vocabulary has 65 of 512"),
    "no maps": (without("d2t", "t2d"), "its weights lack"),
    "another draft vocabulary": (with_config(draft_vocab_size=60), "map 65 of 512 tokens, but its"),
    "another layout": (of_eagle_1, r"fc.weight is \(64, 128\), expected \(64, 192\)"),
    "a missing weight": (without("midlayer.mlp.up_proj.weight"), "up_proj.weight is missing"),
    "a bias that is not declared": (
        lambda checkpoint: checkpoint.tensors.update(biases(checkpoint.tensors)),
        "bias is .*, expected no such weight",
    ),
    "a declared bias that is missing": (with_config(attention_bias=True), "bias is missing"),
    "two layers": (with_config(num_hidden_layers=2), "layers.1.*is missing"),
    "other layers": (
        with_config(eagle_aux_hidden_state_layer_ids=[2, 3, 5]),
        r"are output_of \[1, 2, 4\] as vLLM and \[2, 3, 5\] as SpecForge means them",
    ),
    "no aux states": (
        with_config(eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state is False",
    ),
    "another key": (with_config(logit_scale=0.5), "logit_scale is 0.5"),
    "another key in eagle_config": (with_config(eagle_config={"x": 1}), "eagle_config.x is 1"),
    "another width of the target": (with_config(target_hidden_size=96), "target_hidden_size is 96"),
    "another count of states": (with_config(num_aux_hidden_states=4), "num_aux_hidden_states is 4"),
    "another class": (with_config(architectures=["GptOssForCausalLMEagle3"]), "is a GptOssFor"),
    "another decoder": (with_config(model_type="gpt_oss"), "model_type is 'gpt_oss', expected"),
    "windows": (with_config(use_sliding_window=True), "expected full attention in every layer"),
    "a layer with a window": (
        with_config(layer_types=["sliding_attention"]),
        "its layers are sliding_attention",
    ),
    "another target": (with_config(vocab_size=640), "with vocab_size 640, but tiny has 512"),
    "a wider target": (with_config(hidden_size=128), "with hidden_size 128, but tiny has 64"),
    "angles by length": (
        with_config(rope_scaling={"type": "longrope", "factor": 2.0}),
        "its rotary angles are 'longrope'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_lost_or_belongs_elsewhere_is_refused(target, made, case):
    change, sentence = REFUSED[case]
    folder = made(change)
    with pytest.raises(DraftmillError, match=sentence):
        target.imported("eagle3", folder)
    assert not (folder.parent / "published-imported").exists()


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ([0, 2, 5], "reads output_of 5, the target's final layer"),
        ([0, 2, 9], "reads output_of 9, but the target has 6 decoder layers"),
        ([2, 0, 3], "expected distinct layers in ascending order"),
        ([0, 2], r"fc.weight is \(64, 192\), expected \(64, 128\)"),
    ],
)
def test_configured_layers_that_cannot_be_are_refused(target, made, layers, sentence):
    with pytest.raises(DraftmillError, match=sentence):
        target.imported("eagle3", made(), layers)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"norm_before_residual": None}, "does not say norm_before_residual"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, "distinct layers in ascending order"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, r"reads output_of \[0, 1, 3\], but"),
        ({"draft_vocab_size": None}, "names no draft_vocab_size"),
        ({"speculators_model_type": "peagle"}, "is 'peagle', but the drafter's algorithm"),
        ({"mask_token_id": 7}, "mask_token_id is 7"),
    ],
)
def test_a_file_in_speculators_format_is_held_to_the_same(target, made, changes, sentence):
    folder = target.imported("eagle3", made())
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(DraftmillError, match=sentence):
        target.imported("eagle3", folder)


def test_a_file_in_speculators_format_may_leave_its_layers_to_the_configuration(target, made):
    folder = target.imported("eagle3", made())
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": None}))
    output = target.imported("eagle3", folder)
    assert "names no layers; they are the configuration's" in remarks(output)
    assert json.loads((output / "config.json").read_text()) == config
