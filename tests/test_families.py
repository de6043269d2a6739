"""The tiny checkpoints of tests/families.py are what the target families look like."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

import families
from kimi_layout import GROUP

# the vision tower of Llama 4 holds complex rotations, which a cast to bf16 cuts
pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values")
PLAIN = ["model.embed_tokens.weight", "lm_head.weight"]
NESTED = ["language_model.model.embed_tokens.weight", "language_model.lm_head.weight"]
INSIDE = ["model.language_model.embed_tokens.weight", "lm_head.weight"]
HUB_KEYS = {  # embedding first, then the head where there is one
    "deepseek_v3": [
        *PLAIN,
        "model.layers.5.mlp.experts.7.gate_proj.weight",
        "model.layers.6.eh_proj.weight",
        "model.layers.6.mlp.experts.7.down_proj.weight",
        "model.layers.6.shared_head.head.weight",
    ],
    "deepseek_v3_fp8": [
        *PLAIN,
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv",
        "model.layers.5.mlp.experts.7.gate_proj.weight_scale_inv",
        "model.layers.6.eh_proj.weight",
    ],
    "gemma3": [NESTED[0], "vision_tower.vision_model.post_layernorm.weight"],
    "gemma4": [INSIDE[0], "model.vision_tower.patch_embedder.input_proj.weight"],
    "gpt_oss": [*PLAIN, "model.layers.0.mlp.experts.gate_up_proj_bias"],
    "granite": PLAIN,
    "kimi_k25": [
        *NESTED,
        "language_model.model.layers.1.mlp.experts.0.up_proj.weight",
        "vision_tower.encoder.blocks.0.wqkv.weight",
        "mm_projector.proj.2.weight",
    ],
    "kimi_k25_int4": [
        *NESTED,
        "language_model.model.layers.1.mlp.experts.0.up_proj.weight_packed",
        "language_model.model.layers.1.mlp.shared_experts.up_proj.weight",
        "vision_tower.encoder.blocks.0.wqkv.weight",
    ],
    "llama": PLAIN,
    "llama4": [*NESTED, "language_model.model.layers.1.feed_forward.experts.gate_up_proj"],
    "llama_fp8": [*PLAIN, "model.layers.0.self_attn.q_proj.weight_scale"],
    "llama_int4": [*PLAIN, "model.layers.0.mlp.down_proj.weight_packed"],
    "llama_tied": PLAIN[:1],
    "mistral3": [*NESTED, "multi_modal_projector.linear_1.weight"],
    "qwen3": PLAIN,
    "qwen3_5": [*INSIDE, "model.visual.pos_embed.weight"],
    "qwen3_5_fp8": [
        *INSIDE,
        "model.language_model.layers.0.linear_attn.in_proj_qkv.weight_scale_inv",
        "mtp.layers.0.self_attn.q_proj.weight_scale_inv",
    ],
    "qwen3_5_moe": [*INSIDE, "model.language_model.layers.0.mlp.experts.gate_up_proj"],
    "qwen3_5_mtp": [*INSIDE, "mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"],
    "qwen3_5_text": PLAIN,
    "qwen3_5_tied": [INSIDE[0], "model.visual.pos_embed.weight"],
    "qwen3_moe": [*PLAIN, "model.layers.0.mlp.experts.7.gate_proj.weight"],
}
HEADS = {"lm_head.weight", "language_model.lm_head.weight"}


def config_of(folder: Path) -> PreTrainedConfig:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if folder.name == "kimi_k25_int4":
        pytest.importorskip("compressed_tensors")
        # the hub's list speaks of the text model alone, transformers quantises what it does not name
        quantised = config.text_config.quantization_config
        quantised["ignore"] += ["re:.*vision_tower.*", "re:.*mm_projector.*"]
    return config


def load(auto: type, folder: Path) -> tuple[PreTrainedModel, dict]:
    return auto.from_pretrained(
        folder,
        config=config_of(folder),
        dtype=torch.bfloat16,
        trust_remote_code=False,
        output_loading_info=True,
    )


def classes(folder: Path) -> list[type]:
    known = type(config_of(folder))
    autos = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return [auto for auto in autos if known in auto._model_mapping]


def test_every_family_has_its_layout_written_down():
    assert sorted(families.NAMES) == sorted(HUB_KEYS)


@pytest.mark.parametrize("name", families.NAMES)
def test_a_checkpoint_loads_whole_and_its_text_varies(family, name):
    folder = family(name)
    assert classes(folder)
    for auto in reversed(classes(folder)):
        model, told = load(auto, folder)
        assert not told["missing_keys"]
        assert not told["mismatched_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = [{"role": "user", "content": "Why is the sky blue?"}]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")
    with torch.no_grad():
        assert model(**ids).logits.isfinite().all()
    text = model.generate(**ids, max_new_tokens=20, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert len(text) == 20
    assert len(set(text.tolist())) >= 3
    assert text.max() < len(tokenizer)


@pytest.mark.parametrize("name", families.NAMES)
def test_the_files_hold_the_keys_of_the_hub(family, name):
    folder = family(name)
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(HUB_KEYS[name]) <= set(files)
    assert HEADS & set(files) == HEADS & set(HUB_KEYS[name])
    assert len(set(files.values())) > 1
    held = {key: file.name for file in folder.glob("*.safetensors") for key in load_file(file)}
    assert held == files
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4e6


@pytest.mark.parametrize("name", families.NAMES)
def test_no_parameter_is_left_as_a_constant(family, name):
    for key, value in families.tensors_of(family(name)).items():
        if value.numel() > 1 and not key.endswith("weight_shape"):
            assert value.float().unique().numel() > 1, key


@pytest.mark.parametrize("name", ["qwen3_5_fp8", "kimi_k25_int4"])
def test_the_same_name_gives_the_same_tensors_whatever_was_drawn_before(family, name, tmp_path):
    once = families.tensors_of(family(name))
    torch.rand(3)
    again = families.tensors_of(families.make(name, tmp_path / name))
    assert once.keys() == again.keys()
    # bytes, since FP8 has no comparison
    assert all(torch.equal(once[k].view(torch.uint8), again[k].view(torch.uint8)) for k in once)


def test_making_a_checkpoint_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    families.make("llama", tmp_path / "llama")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_fp8_checkpoint_holds_the_weights_of_the_bf16_one(family):
    exact, _ = load(AutoModelForImageTextToText, family("qwen3_5_mtp"))
    coarse, _ = load(AutoModelForImageTextToText, family("qwen3_5_fp8"))
    layer = "model.language_model.layers.0.linear_attn.{}.weight"
    expected, found = exact.state_dict(), coarse.state_dict()
    for key in (layer.format("in_proj_qkv"), layer.format("out_proj")):
        error = (found[key].float() - expected[key].float()).abs()
        assert 0 < error.max() <= expected[key].float().abs().max() / 16  # 3 bits of mantissa
    assert torch.equal(found[layer.format("in_proj_a")], expected[layer.format("in_proj_a")])


def test_the_int4_checkpoint_holds_the_weights_of_the_bf16_one(family):
    coarse, _ = load(AutoModelForImageTextToText, family("kimi_k25_int4"))
    exact, _ = load(AutoModelForImageTextToText, family("kimi_k25"))
    experts = "model.language_model.layers.1.mlp.experts.down_proj"
    expected, found = exact.state_dict()[experts].float(), coarse.state_dict()[experts].float()
    groups = expected.view(*expected.shape[:-1], -1, GROUP).abs().amax(-1)
    step = groups.repeat_interleave(GROUP, -1) / 7.5
    error = (found - expected).abs()
    assert error.max() > 0
    assert (error <= 0.6 * step).all()
