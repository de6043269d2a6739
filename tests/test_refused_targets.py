"""Checkpoints that are wrong by design: each refused with one sentence while the target is prepared, or earlier."""

import json
import os
import re
import struct
from collections.abc import Callable

import pytest
import torch

from draftmill import checkpoint_files
from edited_checkpoint import Edited, Tensors
from mini_road import manifest_of

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values")
MIXTURES = ("kimi_k25", "kimi_k25_int4", "deepseek_v3", "qwen3_moe")


def with_header(path, header: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def overwritten(path, offset: int, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] = byte
    path.write_bytes(content)


FILES: dict[str, tuple[Callable[[Edited], object], str]] = {
    "a shard is missing": (
        lambda e: e.files()[1].unlink(),
        r"00002-of-0000\d.safetensors: is missing, .*index.json names it; complete the download",
    ),
    "a shard is cut short": (
        lambda e: os.truncate(e.files()[1], e.files()[1].stat().st_size - 100),
        r"of-0000\d.safetensors: damaged or incomplete \(\d+ bytes, but its header says \d+; cut short",
    ),
    "a shard is empty": (lambda e: os.truncate(e.files()[1], 0), r"of-0000\d.safetensors: damaged"),
    "a header is no JSON": (
        lambda e: overwritten(e.files()[0], 8, 0),
        r"00001-of-0000\d.safetensors: damaged .*no safetensors header.*download the checkpoint again",
    ),
    "a header is no UTF-8": (lambda e: overwritten(e.files()[0], 12, 255), "00001.*: damaged"),
    "a header's length is absurd": (
        lambda e: overwritten(e.files()[0], 5, 255),
        "00001.*: damaged",
    ),
    "a header is a list": (lambda e: with_header(e.files()[0], b"[]"), "00001.*: damaged"),
    "a header lacks offsets": (
        lambda e: with_header(e.files()[0], b'{"a": {"dtype": "BF16", "shape": []}}'),
        "00001.*: damaged .*data_offsets",
    ),
    "the index is no JSON": (
        lambda e: e.index.write_text("{"),
        "index.json: damaged or incomplete .*; download the checkpoint again",
    ),
    "the index is no UTF-8": (lambda e: e.index.write_bytes(b"\xff{}"), "index.json: damaged"),
    "the index is a list": (lambda e: e.index.write_text("[]"), "index.json: damaged .*list"),
    "the index has no map": (
        lambda e: e.index.write_text("{}"),
        "index.json: .*lacks 'weight_map'",
    ),
    "the index maps to numbers": (
        lambda e: e.index.write_text('{"weight_map": {"a": 1}}'),
        "is missing, but model.safetensors.index.json names it",
    ),
    "the index maps nothing": (
        lambda e: e.index.write_text('{"weight_map": {}}'),
        "holds no input embedding",
    ),
    "the config is missing": (
        lambda e: (e.folder / "config.json").unlink(),
        "'target.path': .*checkpoint holds no config.json",
    ),
    "the config is no JSON": (
        lambda e: (e.folder / "config.json").write_text('{"model_type":'),
        "config.json: damaged or incomplete .*download the checkpoint again",
    ),
    "the config is a list": (
        lambda e: (e.folder / "config.json").write_text("[]"),
        "config.json: damaged or incomplete .a list",
    ),
    "the config names no model type": (
        lambda e: (e.folder / "config.json").write_text("{}"),
        "config.json: transformers cannot read it .Unrecognized model",
    ),
    "the generation config is no JSON": (
        lambda e: (e.folder / "generation_config.json").write_text("{"),
        "generation_config.json: damaged or incomplete",
    ),
    "no token ends an answer": (
        lambda e: (e.folder / "generation_config.json").write_text('{"eos_token_id": []}'),
        r"generation_config.json: eos_token_id is \[\], expected a token id",
    ),
    "the end is ordinary text in this tokenizer": (
        lambda e: (e.folder / "generation_config.json").write_text('{"eos_token_id": 300}'),
        "ends its answers with token 300, which in this tokenizer is '.*, so this is another model's",
    ),
    "the end is a text": (
        lambda e: (e.folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}'),
        "generation_config.json: eos_token_id is '</s>', expected a token id",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_damaged_file_is_named(edited, case):
    damage, sentence = FILES[case]
    checkpoint = edited("llama")
    damage(checkpoint)
    assert re.search(sentence, checkpoint.refused())


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.9.extra.weight"])
def test_an_index_that_names_a_tensor_which_its_file_lacks_is_named(edited, name):
    checkpoint = edited("llama")
    index = json.loads(checkpoint.index.read_text())
    index["weight_map"][name] = index["weight_map"]["model.embed_tokens.weight"]
    checkpoint.index.write_text(json.dumps(index))
    assert (
        f"does not hold the tensor {name}, which {checkpoint_files.INDEX}" in checkpoint.refused()
    )


def test_a_folder_of_pickled_weights_or_of_nothing_is_refused_while_planning(edited):
    checkpoint = edited("llama")
    for file in [*checkpoint.files(), checkpoint.index]:
        file.unlink()
    torch.save({}, checkpoint.folder / "pytorch_model.bin")
    assert "holds neither model.safetensors.index.json nor" in checkpoint.refused()
    for file in checkpoint.folder.iterdir():
        file.unlink()
    assert "holds no config.json" in checkpoint.refused()


def reshaped(name: str, shape: tuple[int, ...]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        (found,) = [key for key in tensors if key.endswith(name)]
        tensors[found] = torch.zeros(shape, dtype=tensors[found].dtype)

    return change


@pytest.mark.parametrize(
    ("family_name", "name", "shape"),
    [
        ("llama", "embed_tokens.weight", (500, 64)),
        ("llama", "embed_tokens.weight", (512, 32)),
        ("llama", "lm_head.weight", (500, 64)),
        ("llama", "model.norm.weight", (32,)),
        ("llama", "layers.2.self_attn.q_proj.weight", (64, 32)),
        ("llama", "layers.2.self_attn.q_proj.weight", (4096,)),
        ("llama", "layers.2.input_layernorm.weight", (32,)),
        ("kimi_k25", "layers.2.mlp.experts.3.gate_proj.weight", (16, 64)),
        ("kimi_k25_int4", "layers.2.mlp.experts.3.gate_proj.weight_packed", (16, 8)),
        ("kimi_k25_int4", "layers.2.mlp.experts.3.gate_proj.weight_scale", (16, 2)),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(edited, family_name, name, shape):
    sentence = edited(family_name).tensors(reshaped(name, shape)).refused()
    assert re.search(rf"{re.escape(name)} has shape {re.escape(str(shape))}", sentence)
    assert len(re.findall(r"\(\d+,[ \d]*\)", sentence)) == 2


@pytest.mark.parametrize("family_name", MIXTURES)
@pytest.mark.parametrize("part", [r"3\.gate_proj", r"3\.", r"\d+\.gate_proj"])
def test_a_missing_expert_is_named(edited, family_name, part):
    sentence = edited(family_name).without(rf"layers\.2\.mlp\.experts\.{part}").refused()
    assert re.search(r"holds [70] tensors of the kind .*layers.2.mlp.experts.*expected 8", sentence)


@pytest.mark.parametrize("experts", ["3", r"\d+"])
@pytest.mark.parametrize("part", ["packed", "scale", "shape"])
def test_a_packed_expert_without_a_part_is_named(edited, experts, part):
    pattern = rf"layers\.2\.mlp\.experts\.{experts}\.gate_proj\.weight_{part}"
    sentence = edited("kimi_k25_int4").without(pattern).refused()
    assert re.search(
        rf"holds [70] tensors of the kind .*gate_proj.weight_{part}.*expected 8", sentence
    )


def test_a_packed_projection_without_its_scale_is_named(edited):
    sentence = (
        edited("qwen3_5_fp8").without(r"layers\.2\.self_attn\.q_proj\.weight_scale_inv").refused()
    )
    assert re.search(
        "holds 0 tensors of the kind weight_scale_inv .*layers.2.self_attn.q_proj", sentence
    )


@pytest.mark.parametrize("family_name", ["llama", *MIXTURES])
def test_a_missing_layer_is_named(edited, family_name):
    sentence = edited(family_name).without(r"layers\.2\.").refused()
    assert re.search(r"lacks \d+ weights that the model needs, .*layers\.2\.", sentence)


@pytest.mark.parametrize("family_name", ["llama", "deepseek_v3", "kimi_k25"])
@pytest.mark.parametrize(
    ("count", "reason"),
    [
        (5, "of a decoder layer 5, but config.json counts 5 layers, 0 to 4"),
        (8, "lacks .*layers.[67]"),
    ],
)
def test_a_config_that_counts_other_layers_than_the_disk_is_refused(
    edited, family_name, count, reason
):
    def change(config: dict) -> None:
        config.get("text_config", config)["num_hidden_layers"] = count

    assert re.search(reason, edited(family_name).config(change).refused())


@pytest.mark.parametrize("family_name", ["deepseek_v3", "qwen3_5_mtp"])
def test_layers_for_multi_token_prediction_are_left_alone(edited, family_name):
    road = edited(family_name).road()
    road.prepare_target()
    assert manifest_of(road)["layers"] == 6


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.2.self_attn.q_proj.bias", (64,)),
        ("model.layers.0.self_attn.q_norm.weight", (16,)),
        ("lm_head.bias", (512,)),
    ],
)
def test_a_tensor_that_the_model_would_leave_out_is_named(edited, name, shape):
    extra = {name: torch.ones(shape, dtype=torch.bfloat16)}
    sentence = edited("llama").tensors(lambda tensors: tensors.update(extra)).refused()
    assert f"holds {name}, which the model of config.json does not have" in sentence
