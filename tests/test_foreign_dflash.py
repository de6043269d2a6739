"""DFlash checkpoints of others: what is imported computes what was published, and nothing is lost unsaid."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftmill import dflash, foreign_dflash
from foreign_checkpoints import (
    HEADS,
    HIDDEN,
    LAYERS,
    SHARED,
    YARN,
    Checkpoint,
    Target,
    biases,
    dflash_checkpoint,
    remarks,
    with_config,
    with_windows,
    written,
)
from reference_layers import Weights, attention, turned

LENGTH = 24


@pytest.fixture
def target(foreign_target) -> Target:
    return foreign_target


@pytest.fixture
def made(target, tmp_path) -> Callable[..., Path]:
    """(change, layout of the files, options of the builder) -> the folder of a checkpoint."""
    return partial(written, dflash_checkpoint, target, tmp_path / "published")


def with_biases(checkpoint: Checkpoint) -> None:
    checkpoint.config["attention_bias"] = True
    checkpoint.tensors |= biases(checkpoint.tensors)


def in_newer_transformers(checkpoint: Checkpoint) -> None:
    theta, angles = checkpoint.config.pop("rope_theta"), checkpoint.config.pop("rope_scaling")
    assert angles is None
    checkpoint.config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}


def beside_each_other(checkpoint: Checkpoint) -> None:
    checkpoint.config |= checkpoint.config.pop("dflash_config")


SHAPES = {
    "as published": None,
    "yarn": with_config(rope_scaling=YARN),
    "linear angles": with_config(rope_scaling={"type": "linear", "factor": 4.0}),
    "a newer transformers": in_newer_transformers,
    "positions of images": with_config(
        rope_scaling={"rope_type": "default", "mrope_section": [4, 4, 4], "mrope_interleaved": True}
    ),
    "attention bias": with_biases,
    "keys beside one another": beside_each_other,
    "windows": with_windows("sliding", "sliding"),
    "windows and full attention": with_windows("sliding", "full"),
    "windows seen from both sides": with_windows("sliding", "full", is_causal=False),
}


def causal_rule(config: dict, index: int) -> tuple[bool, int | None]:
    """z-lab's: whether a layer sees a block causally, and its window."""
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    sliding = kinds[index] == "sliding_attention"
    causal = sliding if config.get("is_causal") is None else config["is_causal"]
    return causal, config["sliding_window"] if sliding else None


def reference(folder: Path, head: dict, ids: torch.Tensor, aux: torch.Tensor, anchor: int):
    """Logits [block, vocabulary] of the block at `anchor`, from the files as published."""
    config = json.loads((folder / "config.json").read_text())
    weights = Weights(load_file(folder / "model.safetensors"), config["rms_norm_eps"])
    own = config.get("dflash_config", config)
    size = own.get("block_size", config["block_size"])
    context = weights.norm("hidden_norm", weights.linear("fc", aux[:anchor]))
    block = torch.tensor([int(ids[anchor])] + [own["mask_token_id"]] * (size - 1))
    x = head["embed_tokens.weight"].float()[block]
    positions = torch.arange(anchor + size)
    rotary = Qwen3RotaryEmbedding(Qwen3Config.from_dict(config))
    cos, sin = (part[0] for part in rotary(x, positions[None]))
    for index in range(config["num_hidden_layers"]):
        name = f"layers.{index}.self_attn"
        causal, window = causal_rule(config, index)
        distance = positions[-size:, None] - positions[None]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            visible &= distance >= 0
        if window is not None:
            visible &= distance.abs() < window
        residual, x = x, weights.norm(f"layers.{index}.input_layernorm", x)
        both = torch.cat([context, x])
        q = weights.norm(f"{name}.q_norm", weights.heads(f"{name}.q_proj", x, HEADS))
        k = weights.norm(f"{name}.k_norm", weights.heads(f"{name}.k_proj", both, SHARED))
        v = weights.heads(f"{name}.v_proj", both, SHARED)
        q, k = turned(q, (cos[-size:], sin[-size:])), turned(k, (cos, sin))
        x = residual + weights.linear(f"{name}.o_proj", attention(q, k, v, visible))
        residual, x = x, weights.norm(f"layers.{index}.post_attention_layernorm", x)
        x = residual + weights.mlp(f"layers.{index}.mlp", x)
    return weights.norm("norm", x) @ head["lm_head.weight"].float().T


@torch.inference_mode()
def assert_equal_outputs(folder: Path, output: Path, target: Target) -> None:
    """The whole way of measuring, in float32, gives the logits and drafts of the published files."""
    head = load_file(target.head)
    ids = torch.randint(target.manifest["vocab_size"], (LENGTH,))
    aux = torch.randn(LENGTH, len(LAYERS) * HIDDEN)
    model = dflash.load(output, "cpu")
    model.to(torch.float32)
    dflash.check_target(model, target.manifest, LAYERS, output)
    drafts = dflash.drafts(model, {"input_ids": ids, "aux": aux}, model.block_size - 1)
    places = torch.arange(LENGTH)
    for anchor in (1, 7, LENGTH - 1):
        found = dflash.drafted(
            model,
            aux,
            ids,
            torch.zeros_like(places),
            places,
            torch.tensor([anchor]),
            model.block_size,
        )
        expected = reference(folder, head, ids, aux, anchor)[1:]
        torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
        assert drafts[anchor - 1].tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("case", SHAPES)
def test_an_imported_drafter_computes_what_was_published(target, made, case):
    folder = made(SHAPES[case])
    assert_equal_outputs(folder, target.imported("dflash", folder), target)


@pytest.mark.parametrize("name", ["kimi_k25", "qwen3_5", "gemma3", "qwen3_5_moe"])
def test_a_target_with_a_nested_configuration_gets_its_drafter(family, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    target = Target.of(family(name))
    folder = dflash_checkpoint(target.manifest).write(tmp_path / "published")
    assert_equal_outputs(folder, target.imported("dflash", folder), target)


def test_the_files_say_where_the_drafter_comes_from(target, made):
    folder = made()
    output = target.imported("dflash", folder)
    config = json.loads((output / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [layer + 1 for layer in LAYERS]
    assert (config["block_size"], config["mask_token_id"]) == (4, 7)
    assert config["speculators_config"]["verifier"]["name_or_path"] == target.manifest["name"]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    run = json.loads((output / "run.json").read_text())
    assert run["layers"] == {"output_of": LAYERS}
    assert (run["seed"], run["steps"], run["best_step"], run["rendering"]) == (None,) * 4
    assert run["imported"]["format"] == "DFlash"
    assert sorted(run["imported"]["files"]) == ["config.json", "model.safetensors"]
    assert run["imported"]["remarks"] == ["embedding: the target's", "head: rows of the target"]
    assert run["record"]["dtypes"] == {"exported checkpoint": "bfloat16"}


def test_the_same_checkpoint_gives_the_same_bytes_in_one_file_or_in_shards(target, made, tmp_path):
    one = target.imported("dflash", made())
    checkpoint = Checkpoint(
        json.loads((tmp_path / "published/config.json").read_text()),
        load_file(tmp_path / "published/model.safetensors"),
    )
    for kind in ("shards", "pickle", "pickles"):
        other = target.imported("dflash", checkpoint.write(tmp_path / kind, kind))
        for name in ("config.json", "model.safetensors"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), kind


def test_a_drafter_in_speculators_format_comes_through_unchanged(target, made, tmp_path):
    first = target.imported("dflash", made(with_windows("sliding", "full", is_causal=False)))
    second = target.imported("dflash", first)
    for name in ("config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    run = json.loads((second / "run.json").read_text())
    assert run["imported"]["remarks"][-2:] == [
        "embedding: its own, equal to the target's",
        "head: its own",
    ]


def test_layers_that_the_file_leaves_out_are_those_of_the_published_loader(target, made):
    def change(checkpoint: Checkpoint) -> None:
        del checkpoint.config["dflash_config"]["target_layer_ids"]
        checkpoint.tensors["fc.weight"] = checkpoint.tensors["fc.weight"][:, : 2 * HIDDEN]

    folder = made(change)
    run = json.loads((target.imported("dflash", folder, [1, 3]) / "run.json").read_text())
    assert run["layers"] == {"output_of": [1, 3]}  # of 6 layers
    assert foreign_dflash.default_layers(64, 5) == [1, 16, 31, 46, 61]
    assert foreign_dflash.default_layers(6, 1) == [3]


def test_half_precision_weights_are_cast_and_recorded(target, made):
    def change(checkpoint: Checkpoint) -> None:
        checkpoint.tensors = {k: v.half() for k, v in checkpoint.tensors.items()}

    output = target.imported("dflash", made(change))
    assert {t.dtype for t in load_file(output / "model.safetensors").values()} == {torch.bfloat16}
    run = json.loads((output / "run.json").read_text())
    assert run["imported"]["dtypes"] == {"float16": 25}


@pytest.mark.parametrize(("kind", "told"), [("sliding", 1), ("full", 0)])
def test_how_windows_are_counted_is_told(target, made, kind, told):
    output = target.imported("dflash", made(with_windows(kind, "full")))
    assert sum(remark.startswith("windows: ") for remark in remarks(output)) == told
