"""DFlash checkpoints of others: what is imported computes what was published, and nothing is lost unsaid."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from speculators import SpeculatorModelConfig
from speculators.models.dflash import DFlashDraftModel
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import import_drafter
from draftmill import foreign_dflash
from draftmill.errors import DraftmillError
from foreign_checkpoints import HEADS, HIDDEN, LAYERS, SHARED, Checkpoint, Target, biases, dflash
from reference_layers import Weights, attention, turned

LENGTH = 24
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def target(prepared_target, tmp_path, monkeypatch) -> Target:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return Target(prepared_target)


@pytest.fixture
def made(target, tmp_path) -> Callable[..., Path]:
    """(change of the checkpoint, layout of its files) -> its folder."""

    def make(change: Callable | None = None, kind: str = "safetensors") -> Path:
        checkpoint = dflash(target.manifest)
        if change:
            change(checkpoint)
        return checkpoint.write(tmp_path / "published", kind)

    return make


def with_config(**changes) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.config.update(changes)


def with_dflash(**changes) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.config["dflash_config"].update(changes)


def with_biases(checkpoint: Checkpoint) -> None:
    checkpoint.config["attention_bias"] = True
    checkpoint.tensors |= biases(checkpoint.tensors)


def with_windows(*kinds: str, **more) -> Callable[[Checkpoint], None]:
    kinds = [f"{kind}_attention" for kind in kinds]
    return with_config(use_sliding_window=True, sliding_window=64, layer_types=kinds, **more)


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


def loaded(folder: Path) -> DFlashDraftModel:
    """The imported drafter in speculators' model, in float32, every weight from its file."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = DFlashDraftModel(config)
    model.verifier_norm = model.verifier_lm_head = nn.Identity()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    return model.eval()


@torch.inference_mode()
def logits_at_every_anchor(model: DFlashDraftModel, ids: torch.Tensor, aux: torch.Tensor):
    """[anchors, block, vocabulary]; anchors from 0 to LENGTH - block - 1."""
    anchors = len(ids) - model.block_size
    _, logits, *_ = model._backbone_forward(
        aux[None],
        ids[None],
        torch.ones(1, len(ids), dtype=torch.bool),
        torch.zeros(1, len(ids), HIDDEN),
        torch.zeros(1, len(ids), dtype=torch.long),
        max_anchors=anchors,
    )
    return logits[0].view(anchors, model.block_size, -1)


def assert_equal_outputs(folder: Path, output: Path, target: Target) -> None:
    head = load_file(target.head)
    ids = torch.randint(target.manifest["vocab_size"], (LENGTH,))
    aux = torch.randn(LENGTH, len(LAYERS) * HIDDEN)
    found = logits_at_every_anchor(loaded(output), ids, aux)
    for anchor in (1, 7, len(found) - 1):
        expected = reference(folder, head, ids, aux, anchor)
        torch.testing.assert_close(found[anchor], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", SHAPES)
def test_an_imported_drafter_computes_what_was_published(target, made, case):
    folder = made(SHAPES[case])
    assert_equal_outputs(folder, target.imported("dflash", folder), target)


@pytest.mark.parametrize("name", ["kimi_k25", "qwen3_5", "gemma3", "qwen3_5_moe"])
def test_a_target_with_a_nested_configuration_gets_its_drafter(family, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    target = Target.of(family(name))
    folder = dflash(target.manifest).write(tmp_path / "published")
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


def without(name: str) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.tensors.pop(name)


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
