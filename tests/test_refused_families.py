"""Models that cannot be targets, and quantisations that are not known to dequantise rightly."""

import re
from collections.abc import Callable

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from edited_checkpoint import Edited, Tensors
from family_layouts import block_fp8
from kimi_layout import packed_int4
from mini_road import MiniRoad
from tiny_target import make_tokenizer

SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": 512, "d_model": 32, "num_layers": 6, "num_heads": 2, "d_kv": 16, "d_ff": 64}
BART = {
    "vocab_size": 512,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 6,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
OTHERS = {
    "bert": ("BertForMaskedLM", SIZES, "'bert' is an encoder-only model"),
    "roberta": ("RobertaForMaskedLM", SIZES, "'roberta' is an encoder-only model"),
    "modernbert": (
        "ModernBertForMaskedLM",
        SIZES | SPECIAL | {"cls_token_id": 1, "sep_token_id": 2},
        "no language model for model_type 'modernbert'; an encoder-only",
    ),
    "t5": ("T5ForConditionalGeneration", T5, "no language model for model_type 't5'"),
    "bart": ("BartForConditionalGeneration", BART, "'bart' is an encoder-decoder"),
    "vit": (
        "ViTForImageClassification",
        {k: v for k, v in SIZES.items() if k != "vocab_size"},
        "no language model for model_type 'vit'",
    ),
}


def saved_as(checkpoint: Edited, architecture: str, settings: dict) -> Edited:
    """The checkpoint's folder with another model in it."""
    for file in checkpoint.folder.iterdir():
        file.unlink()
    kind = getattr(transformers, architecture)
    config: PretrainedConfig = kind.config_class(**settings)
    kind(config).save_pretrained(checkpoint.folder)
    make_tokenizer().save_pretrained(checkpoint.folder)
    return checkpoint


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_is_no_causal_decoder_is_refused(edited, name):
    architecture, settings, sentence = OTHERS[name]
    assert re.search(sentence, saved_as(edited("llama"), architecture, settings).refused())


@pytest.mark.parametrize("architecture", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_decoder_without_a_head_is_refused(edited, architecture):
    checkpoint = saved_as(edited("llama"), architecture, SIZES | SPECIAL)
    assert "holds no lm_head.weight" in checkpoint.refused()


def test_a_model_type_that_transformers_does_not_know_is_refused(edited):
    sentence = edited("llama").config(lambda c: c.update(model_type="mystery")).refused()
    assert re.search(
        "config.json: transformers cannot read it .*mystery.*; correct it, or take", sentence
    )


def sees_the_future(checkpoint: Edited) -> MiniRoad:
    """The road of a prefix language model up to its states: nothing in its files tells."""
    text = SIZES | SPECIAL | {"num_key_value_heads": 1, "head_dim": 16, "model_type": "gemma"}
    vision = {k: v for k, v in SIZES.items() if k != "vocab_size"}
    vision |= {"image_size": 16, "patch_size": 4, "vision_use_head": False}
    settings = {"text_config": text, "vision_config": vision, "image_token_index": 511}
    saved_as(checkpoint, "PaliGemmaForConditionalGeneration", settings | {"projection_dim": 32})
    return checkpoint.road()


@pytest.mark.parametrize("backend", ["resident", "streamed"])
def test_a_decoder_whose_attention_sees_the_future_fails_the_gate(edited, backend):
    torch.manual_seed(0)
    road = sees_the_future(edited("llama"))
    road.prepare_target()
    for step in ("prepare_prompts", "generate_responses", "tokenize_conversations"):
        getattr(road, step)("judge")
    road.extract_hidden_states("judge")
    with pytest.raises(Exception, match="so the target's attention sees the future") as caught:
        road.gate_hidden_states("judge", backend=backend)
    assert type(caught.value).__name__ == "DraftmillError"
    assert not (road.root / "gates").exists()


METHODS = ("gptq", "awq", "bitsandbytes", "mxfp4", "made-up", None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("family_name", ["llama", "kimi_k25"])
def test_an_unknown_quantisation_is_refused_wherever_it_stands(edited, family_name, dtype, method):
    def change(config: dict) -> None:
        place = config.get("text_config", config)
        for level in (config, place):
            level.pop("dtype", None)
        place[dtype] = "bfloat16"
        found = {"quant_method": method, "bits": 4, "group_size": 32, "load_in_4bit": True}
        place["quantization_config"] = {k: v for k, v in found.items() if v is not None}

    sentence = edited(family_name).config(change).refused()
    assert f"quantised by '{method}', which is not supported; supported are" in sentence


@pytest.mark.parametrize("place", ["top", "nested"])
@pytest.mark.parametrize("value", [[1], "int4"])
def test_a_quantisation_that_is_no_object_is_refused(edited, place, value):
    def change(config: dict) -> None:
        (config if place == "top" else config["text_config"])["quantization_config"] = value

    assert "config.json: transformers cannot read it" in edited("kimi_k25").config(change).refused()


@pytest.mark.parametrize(
    "layout", ["marlin-24", "nvfp4-pack-quantized", "int-quantized", "x", None]
)
def test_an_unknown_format_of_compressed_tensors_is_refused(edited, layout):
    def change(config: dict) -> None:
        config["text_config"]["quantization_config"]["format"] = layout

    sentence = edited("kimi_k25_int4").config(change).refused()
    assert f"compressed-tensors' format '{layout}'" in sentence


def test_compressed_tensors_without_groups_are_refused(edited):
    def change(config: dict) -> None:
        del config["text_config"]["quantization_config"]["config_groups"]

    assert "with 0 config_groups" in edited("kimi_k25_int4").config(change).refused()


def packed_head(tensors: Tensors) -> None:
    name = "language_model.lm_head.weight"
    weight = tensors.pop(name)
    tensors[f"{name}_packed"], tensors[f"{name}_scale"] = packed_int4(weight)
    tensors[f"{name}_shape"] = torch.tensor(weight.shape, dtype=torch.int32)


def fp8_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"], tensors["lm_head.weight_scale_inv"] = block_fp8(
        tensors["lm_head.weight"], torch.bfloat16
    )


@pytest.mark.parametrize(
    ("family_name", "change"), [("kimi_k25_int4", packed_head), ("qwen3_5_fp8", fp8_head)]
)
def test_a_quantised_head_is_refused(edited, family_name, change):
    sentence = edited(family_name).tensors(change).refused()
    assert re.search("lm_head.weight_.* belongs to a packed weight; a quantised .* head", sentence)


def fp8_without_scale(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)


def test_a_head_of_fp8_numbers_is_refused(edited):
    sentence = edited("llama").tensors(fp8_without_scale).refused()
    assert "lm_head.weight is stored as F8_E4M3, expected one of BF16, F16, F32" in sentence


def integers(tensors: Tensors) -> None:
    tensors["model.layers.2.self_attn.q_proj.weight"] = torch.ones(64, 64, dtype=torch.int8)


def without_quantisation(config: dict) -> None:
    for place in (config, config.get("text_config", {})):
        place.pop("quantization_config", None)


@pytest.mark.parametrize(
    ("family_name", "edit", "sentence"),
    [
        (
            "llama",
            lambda e: e.tensors(integers),
            "q_proj.weight is stored as I8, but config.json names no",
        ),
        (
            "qwen3_5_fp8",
            lambda e: e.config(without_quantisation),
            "is stored as F8_E4M3, but config.json",
        ),
        ("kimi_k25_int4", lambda e: e.config(without_quantisation), r"lacks \d+ weights"),
    ],
)
def test_packed_weights_without_a_quantisation_in_the_config_are_refused(
    edited, family_name, edit: Callable[[Edited], Edited], sentence
):
    assert re.search(sentence, edit(edited(family_name)).refused())


@pytest.mark.parametrize("block", [[64, 64], [96, 128]])
def test_fp8_blocks_that_do_not_fit_their_scales_are_refused(edited, block):

    def change(config: dict) -> None:
        config["quantization_config"]["weight_block_size"] = block

    sentence = edited("qwen3_5_fp8").config(change).refused()
    assert re.search(rf"scales of shape .* one per block of \({block[0]}, {block[1]}\)", sentence)


def test_a_dtype_that_torch_does_not_know_is_refused(edited):
    sentence = edited("llama").config(lambda c: c.update(dtype="bf17")).refused()
    assert re.search("config.json: transformers cannot read it .*bf17", sentence)
