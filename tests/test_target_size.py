"""Parameter counts from a configuration alone: exact where weights are there, right for published targets."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import families
from draftmill import eagle3
from draftmill.driver.config import completed
from draftmill.driver.drafter_size import drafter_size
from draftmill.driver.estimate import Options, estimate
from draftmill.driver.plan import Plan
from draftmill.driver.target_description import checkpoint_folder, target_config
from draftmill.driver.target_size import is_ignored, scale_count, target_size
from draftmill.driver.token_estimate import Assumed
from draftmill.errors import DraftmillError
from draftmill.target_manifest import read_manifest

TARGETS = Path(__file__).resolve().parents[1] / "configs" / "targets"
# heads for several tokens at a time (beside 6 layers), and what sees pictures
EXTRA = ("mtp.", "model.layers.6.", "model.visual.")
HUB = {"path": None, "hub": "a/b", "revision": "0" * 40, "package": None, "config": None}


def published(name: str):
    config, _ = target_config(HUB | {"config": str(TARGETS / f"{name}.config.json")})
    return config


def test_the_counts_of_a_checkpoint_are_those_of_the_loaded_model(tiny_target):
    config, where = target_config(HUB | {"hub": None, "path": str(tiny_target)})
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype="bfloat16")
    size = target_size(config, "bfloat16")
    assert where == str(tiny_target / "config.json")
    assert size.total == sum(p.numel() for p in model.parameters())
    assert size.embedding == size.head == size.output == 512 * 64
    assert size.decoder_layers == sum(p.numel() for p in model.model.layers.parameters())
    assert size.largest_layer * 6 == size.decoder_layers
    assert size.active == size.total - size.embedding
    assert size.beside_layers == size.total - size.decoder_layers
    assert size.experts_part == 0


def test_a_tied_head_is_counted_once_but_multiplied():
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    size = target_size(config, "float32")
    model = transformers.LlamaForCausalLM(config)
    assert size.total == sum(p.numel() for p in model.parameters())
    assert (size.head, size.output, size.active) == (0, 1600, size.total)
    assert size.beside_layers == size.total - size.decoder_layers


def test_experts_count_by_the_share_that_a_token_visits():
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    size = target_size(config, "bfloat16")
    routed = 3 * 8 * 3 * 16 * 32
    assert size.active == size.total - size.embedding - routed * 6 / 8
    assert size.experts.endswith("x 2 / 8")
    part = 2 * 16 * 32  # gate and up projections are one tensor
    assert size.experts_part == part, "a sixteenth of 8 experts is one all the same"
    config.num_local_experts = 40
    assert target_size(config, "bfloat16").experts_part == 2 * part


# total and active parameters as the model cards and papers give them
@pytest.mark.parametrize(
    ("name", "total", "active", "layers"),
    [
        ("kimi-k2.5", 1.03e12, 32e9, 61),
        ("qwen3-8b", 8.19e9, 8.19e9 - 151936 * 4096, 36),
        ("llama-3.1-8b-instruct", 8.03e9, 8.03e9 - 128256 * 4096, 32),
        ("qwen3.6-27b", 27e9, 27e9 - 248320 * 5120, 64),
    ],
)
def test_published_targets_have_their_published_size(name, total, active, layers):
    size = target_size(published(name), "bfloat16")
    assert size.total == pytest.approx(total, rel=0.01)
    assert size.active == pytest.approx(active, rel=0.02)
    assert size.layers == layers


def test_the_stored_bytes_of_packed_int4_are_those_of_the_published_files():
    """554.27 GiB in 208,550 tensors; a dense target's files hold its declared dtype."""
    assert target_size(published("kimi-k2.5"), "bfloat16").stored == pytest.approx(
        554.27 * 2**30, rel=0.005
    )
    dense = target_size(published("qwen3-8b"), "bfloat16")
    assert dense.stored == dense.total * 2


@pytest.mark.parametrize("name", ["deepseek_v3_fp8", "llama_fp8", "llama_int4", "qwen3_5_fp8"])
def test_the_stored_bytes_of_quantised_targets_are_those_of_their_weights(name, tmp_path):
    folder = families.make(name, tmp_path / name)
    config, _ = target_config(HUB | {"hub": None, "path": str(folder)})
    read = 0
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        read += sum(t.nbytes for n, t in tensors.items() if not n.startswith(EXTRA))
    size = target_size(config, "bfloat16")
    assert size.stored == pytest.approx(read, rel=0.03)
    assert size.stored < 0.95 * size.bytes_of(size.total)


def test_masks_are_counted_by_kind_of_attention():
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6}
    mixed = transformers.Gemma3TextConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    assert set(mixed.layer_types) == {"full_attention", "sliding_attention"}
    assert target_size(mixed, "bfloat16").mask_kinds == 2
    plain = transformers.LlamaConfig(num_attention_heads=2, **sizes)
    assert target_size(plain, "bfloat16").mask_kinds == 1


def test_scales_are_counted_by_group_block_row_or_tensor():
    shape = torch.Size([3, 100, 256])
    assert scale_count(shape, {"group_size": 32}) == 3 * 100 * 8
    assert scale_count(shape, {"block_structure": [128, 128]}) == 3 * 1 * 2
    assert scale_count(shape, {"strategy": "channel", "group_size": None}) == 300
    assert scale_count(shape, {"strategy": "tensor"}) == 3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "t5"}, "encoder-decoder|no language model"),
        ({"model_type": "bert"}, "encoder-only"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised by 'awq'"),
    ],
)
def test_what_the_stages_refuse_is_refused_while_planning(tiny_target, tmp_path, changes, sentence):
    about = json.loads((tiny_target / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(DraftmillError, match=sentence):
        target_config(HUB, tmp_path / "config.json")


def test_ignored_modules_are_matched_by_name_or_pattern():
    assert is_ignored("lm_head.weight", ["lm_head"])
    assert is_ignored("model.layers.3.mlp.gate.weight", ["model.layers.3.mlp.gate"])
    assert not is_ignored("model.layers.31.mlp.up.weight", ["model.layers.3"])
    assert is_ignored("layers.3.self_attn.o_proj.weight", ["re:.*self_attn.*"])
    assert not is_ignored("layers.3.mlp.experts.down_proj", ["re:.*mlp\\.(gate|down)_proj.*"])


def test_a_drafter_is_counted_as_the_stage_builds_it(config, prepared_target):
    settings = {
        "algorithm": "eagle3",
        "num_layers": 1,
        "draft_vocab_size": 256,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "ttt_steps": 3,
    }
    manifest = read_manifest(prepared_target / "manifest.json")
    built = eagle3.config_of(settings | {"layers": {"output_of": [0, 2, 3]}}, manifest, "cpu", 256)
    model = eagle3.empty(built)
    counts = {n: p.numel() for n, p in model.named_parameters()}
    target, _ = target_config(HUB | {"hub": None, "path": config["target"]["path"]})
    found = drafter_size(settings, [0, 2, 3], target, target_size(target, "bfloat16"))
    assert found.total == sum(counts.values())
    assert found.frozen == counts["embed_tokens.weight"] + counts["lm_head.weight"]
    assert found.multiplied == found.total - counts["embed_tokens.weight"]


def test_the_checkpoints_own_configuration_goes_before_the_copy(tiny_target, tmp_path):
    changed = json.loads((tiny_target / "config.json").read_text()) | {"num_hidden_layers": 9}
    (tmp_path / "copy.json").write_text(json.dumps(changed))
    target = HUB | {"hub": None, "path": str(tiny_target), "config": str(tmp_path / "copy.json")}
    assert target_config(target)[0].num_hidden_layers == 6
    absent = target | {"path": str(tmp_path / "absent")}
    assert target_config(absent)[0].num_hidden_layers == 9
    assert target_config(target, tmp_path / "copy.json")[0].num_hidden_layers == 9


def test_a_hub_target_that_was_downloaded_is_read_from_the_local_cache(
    tiny_target, monkeypatch, tmp_path
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--a--b" / "snapshots" / HUB["revision"]
    shutil.copytree(tiny_target, snapshot)
    config, where = target_config(HUB | {"config": "another.json"})
    assert (config.num_hidden_layers, where) == (6, str(snapshot / "config.json"))
    assert checkpoint_folder(HUB, "results/tiny") == snapshot
    elsewhere = HUB | {"revision": "1" * 40}
    assert checkpoint_folder(elsewhere, "results/tiny") is None


@pytest.mark.slow
def test_the_demo_is_planned_from_its_gguf(monkeypatch, repository):
    monkeypatch.chdir(repository)
    config = completed(yaml.safe_load((repository / "config.yaml").read_text()))
    found = estimate(Plan(config), Options(Assumed()))
    assert found["target"]["total"] == 134_515_008
    assert found["sources"]["stdlib_test"]["basis"] == "at most, tokenized 64 rows"
    assert found["layers"]["eagle3"] == config["drafters"]["eagle3"]["layers"]["output_of"]


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (HUB, "planning downloads nothing"),
        (HUB | {"hub": None, "path": "absent"}, "give the target's config.json"),
        (HUB | {"config": "absent.json"}, "give the target's config.json"),
    ],
)
def test_a_target_without_a_configuration_at_hand_is_refused(
    target, sentence, monkeypatch, tmp_path
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DraftmillError, match=sentence):
        target_config(target)


def test_an_unknown_family_is_refused_by_name(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "no_such_family"}')
    with pytest.raises(DraftmillError, match="cannot read it"):
        target_config(HUB, path)
