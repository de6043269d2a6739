"""EAGLE-3 checkpoints of others: what is imported drafts what was published, and nothing is lost unsaid."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftmill import eagle3
from foreign_checkpoints import (
    HEADS,
    HIDDEN,
    KEPT,
    LAYERS,
    SHARED,
    Checkpoint,
    Target,
    biases,
    eagle3_checkpoint,
    remarks,
    with_config,
    written,
)
from reference_layers import Weights, attention, turned

LENGTH, STEPS = 20, 3
AUX = len(LAYERS) * HIDDEN


@pytest.fixture
def target(foreign_target) -> Target:
    return foreign_target


@pytest.fixture
def made(target, tmp_path) -> Callable[..., Path]:
    """(change, layout of the files, options of the builder) -> the folder of a checkpoint."""
    return partial(written, eagle3_checkpoint, target, tmp_path / "published")


def with_biases(checkpoint: Checkpoint) -> None:
    checkpoint.config["attention_bias"] = True
    checkpoint.tensors |= biases(checkpoint.tensors)


def with_one_norm_before_fc(checkpoint: Checkpoint) -> None:
    checkpoint.config["eagle_config"] = {"norm_before_fc": True, "use_aux_hidden_state": True}
    checkpoint.tensors["input_norm.weight"] = 1 + 0.3 * torch.randn(AUX).bfloat16()


def as_eagle_3_1(checkpoint: Checkpoint) -> None:
    checkpoint.config |= {"fc_norm": True, "norm_output": True}
    for index in range(len(LAYERS)):
        gains = 1 + 0.3 * torch.randn(HIDDEN).bfloat16()
        checkpoint.tensors[f"fc_norm.{index}.weight"] = gains


def without_rotary_base(checkpoint: Checkpoint) -> None:
    del checkpoint.config["rope_theta"], checkpoint.config["rope_scaling"]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES = {
    "as published": None,
    "the residual after the norm": with_config(norm_before_residual=True),
    "attention bias": with_biases,
    "a norm before fc": with_one_norm_before_fc,
    "EAGLE-3.1": as_eagle_3_1,
    "no rotary base": without_rotary_base,
    "Llama-3's angles": with_config(rope_scaling=LLAMA3),
}


class Reference:
    """A real draft loop with a cache, from the files as published."""

    def __init__(self, folder: Path, head: dict):
        self.config = config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.weights = Weights(tensors, config["rms_norm_eps"])
        self.embedding = tensors.get("embed_tokens.weight", head["embed_tokens.weight"]).float()
        self.d2t = tensors.get("d2t")
        if "lm_head.weight" not in tensors:
            kept = tensors["t2d"] if self.d2t is not None else slice(None)
            self.weights.tensors["lm_head.weight"] = head["lm_head.weight"][kept].float()
        self.rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(config))

    def states(self, aux: torch.Tensor) -> torch.Tensor:
        """[tokens, layers * hidden] -> [tokens, hidden]."""
        if (self.config.get("eagle_config") or {}).get("norm_before_fc"):
            aux = self.weights.norm("input_norm", aux)
        if self.config.get("fc_norm"):
            parts = aux.chunk(len(LAYERS), dim=-1)
            normed = [self.weights.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)]
            aux = torch.cat(normed, dim=-1)
        return self.weights.linear("fc", aux)

    def layer(self, ids, states, first: int, cache: list) -> torch.Tensor:
        """Appends rows to the cache and gives their outputs; every row sees those before it and itself."""
        w, name = self.weights, "midlayer.self_attn"
        normed = w.norm("midlayer.hidden_norm", states)
        residual = normed if self.config.get("norm_before_residual") else states
        embedded = w.norm("midlayer.input_layernorm", self.embedding[ids])
        both = torch.cat([embedded, normed], dim=-1)
        positions = torch.arange(first, first + len(ids))
        angles = tuple(part[0] for part in self.rotary(both, positions[None]))
        q = turned(w.heads(f"{name}.q_proj", both, HEADS), angles)
        k = turned(w.heads(f"{name}.k_proj", both, SHARED), angles)
        v = w.heads(f"{name}.v_proj", both, SHARED)
        if cache:
            k, v = torch.cat([cache[0], k], dim=1), torch.cat([cache[1], v], dim=1)
        cache[:] = [k, v]
        visible = torch.arange(k.shape[1]) < positions[:, None]
        x = residual + w.linear(f"{name}.o_proj", attention(q, k, v, visible))
        return x + w.mlp("midlayer.mlp", w.norm("midlayer.post_attention_layernorm", x))

    def logits(self, ids: torch.Tensor, aux: torch.Tensor, row: int) -> torch.Tensor:
        """[STEPS, draft vocabulary] of the chain after token row + 1; the drafts fed are the text's tokens."""
        cache: list = []
        x = self.layer(ids[1 : row + 2], self.states(aux[: row + 1]), 1, cache)[-1:]
        found = []
        for step in range(STEPS):
            normed = self.weights.norm("norm", x)
            found.append(self.weights.linear("lm_head", normed)[0])
            x = normed if self.config.get("norm_output") else x
            token = ids[row + 2 + step : row + 3 + step]
            x = self.layer(token, x, row + 2 + step, cache)
        return torch.stack(found)


def assert_equal_drafts(folder: Path, output: Path, target: Target) -> None:
    """The whole way of measuring, in float32, gives the logits and drafts of the published files."""
    head = load_file(target.head)
    ids = torch.randint(target.manifest["vocab_size"], (LENGTH,))
    aux = torch.randn(LENGTH, AUX)
    model = eagle3.load(output, "cpu")
    model.to(torch.float32)
    eagle3.check_target(model, target.manifest, LAYERS, output)
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, logits: seen.append(logits[0]))
    drafts = eagle3.drafts(model, {"input_ids": ids, "aux": aux}, STEPS)
    reference = Reference(folder, head)
    for row in (0, 5, LENGTH - STEPS - 3):
        expected = reference.logits(ids, aux, row)
        found = torch.stack([logits[row] for logits in seen])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        chosen = expected.argmax(-1)
        chosen = chosen if reference.d2t is None else chosen + reference.d2t[chosen]
        assert drafts[row].tolist() == chosen.tolist()


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("case", SHAPES)
def test_an_imported_drafter_drafts_what_was_published(target, made, case, embedding):
    folder = made(SHAPES[case], embedding=embedding)
    assert_equal_drafts(folder, target.imported("eagle3", folder), target)


def without_head(checkpoint: Checkpoint) -> None:
    del checkpoint.tensors["lm_head.weight"]


def without_maps(checkpoint: Checkpoint) -> None:
    del checkpoint.tensors["t2d"], checkpoint.tensors["d2t"]


@pytest.mark.parametrize("change", [None, without_maps, without_head])
def test_a_full_draft_vocabulary_needs_no_maps(target, made, change):
    folder = made(change, kept=list(range(target.manifest["vocab_size"])))
    output = target.imported("eagle3", folder)
    assert not {"t2d", "d2t"} & load_file(output / "model.safetensors").keys()
    if change is not without_head:
        assert_equal_drafts(folder, output, target)


def test_a_head_that_is_left_out_is_the_targets_rows(target, made):
    folder = made(without_head)
    output = target.imported("eagle3", folder)
    expected = load_file(target.head)["lm_head.weight"][KEPT]
    assert torch.equal(load_file(output / "model.safetensors")["lm_head.weight"], expected)
    assert_equal_drafts(folder, output, target)


@pytest.mark.parametrize("name", ["kimi_k25", "qwen3_5", "gemma3", "deepseek_v3"])
def test_a_target_of_another_family_gets_its_drafter(family, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    target = Target.of(family(name))
    folder = eagle3_checkpoint(target.manifest).write(tmp_path / "published")
    assert_equal_drafts(folder, target.imported("eagle3", folder), target)


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        (None, "names no layers; they are the configuration's"),
        ([1, 3, 4], "its layer ids [1, 3, 4] are read as vLLM means them"),
        ([0, 2, 3], "its layer ids [0, 2, 3] are read as SpecForge means them"),
    ],
)
def test_layers_are_the_configurations_and_how_the_file_names_them_is_told(
    target, made, ids, sentence
):
    folder = made(with_config(eagle_config={"eagle_aux_hidden_state_layer_ids": ids}))
    output = target.imported("eagle3", folder)
    assert sentence in remarks(output)
    config = json.loads((output / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


@pytest.mark.parametrize(
    ("embedding", "sentence"),
    [(None, "embedding: the target's"), ("own", "embedding: its own, other than the target's")],
)
def test_whose_embedding_and_head_it_has_is_told(target, made, embedding, sentence):
    output = target.imported("eagle3", made(embedding=bool(embedding)))
    assert remarks(output)[-2:] == [sentence, "head: its own"]


def test_the_targets_own_embedding_in_a_checkpoint_is_told(target, made):
    own = load_file(target.head)["embed_tokens.weight"]
    folder = made(lambda checkpoint: checkpoint.tensors.update({"embed_tokens.weight": own}))
    told = remarks(target.imported("eagle3", folder))
    assert "embedding: its own, equal to the target's" in told


def test_a_drafter_in_speculators_format_comes_through_unchanged(target, made):
    first = target.imported("eagle3", made(as_eagle_3_1))
    second = target.imported("eagle3", first)
    for name in ("config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_a_drafter_that_was_trained_here_comes_through_unchanged(ready_road, prepared_target):
    folder = ready_road.train()
    output = Target(prepared_target).imported("eagle3", folder)
    first, second = (load_file(f / "model.safetensors") for f in (folder, output))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    configs = [json.loads((f / "config.json").read_text()) for f in (folder, output)]
    angles = [config["transformer_layer_config"]["rope_parameters"] for config in configs]
    assert angles[0] == angles[1]
    assert configs[0]["norm_before_residual"] is configs[1]["norm_before_residual"] is True


def test_drafts_of_a_text_are_measured_by_the_same_code(ready_road, prepared_target, made):
    """An imported drafter stands where a trained one would and is measured."""
    output = Target(prepared_target).imported("eagle3", made())
    road = ready_road
    trained = json.loads((road.train() / "run.json").read_text())
    folder = road.root / "drafters/small"
    shutil.rmtree(folder)
    shutil.copytree(output, folder)
    run = json.loads((folder / "run.json").read_text())
    run |= {key: trained[key] for key in ("fingerprint", "rendering")}
    (folder / "run.json").write_text(json.dumps(run))
    found = json.loads(road.measure_acceptance("judge").read_text())
    assert found["drafter"]["steps"] is None
