"""Training of DFlash2 and DSpark on the tiny target, to the exported drafter and its tau."""

import copy
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from block_models import BLOCK, CASES, LAYERS, Model, each_case, road_of
from draftmill import algorithms
from draftmill.errors import DraftmillError
from draftmill.target_manifest import read_manifest
from mini_road import MiniRoad
from workflow import with_block_drafter


@each_case
def test_training_lowers_the_loss_and_its_export_reads_back_strictly(block_states, case):
    road = road_of(block_states, case, steps=40, learning_rate=0.01, validate_every=20)
    folder = road.train("block")
    rows = pq.read_table(folder / "metrics.parquet").to_pylist()
    losses = [r["loss"] for r in rows if r["kind"] == "train"]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    algorithm = algorithms.load(CASES[case]["algorithm"])
    model = algorithm.load(folder, "cpu")
    algorithm.check_target(model, read_manifest(road.target), LAYERS, folder)
    written = load_file(folder / "model.safetensors")
    assert set(written) == set(model.state_dict())
    assert all(torch.equal(written[k], v) for k, v in model.state_dict().items())
    head = load_file(road.head)
    assert torch.equal(written["embed_tokens.weight"], head["embed_tokens.weight"])
    count = BLOCK - algorithm.FIRST
    proposed = json.loads((folder / "config.json").read_text())["speculators_config"]
    assert proposed["proposal_methods"][0]["speculative_tokens"] == count
    found = json.loads(road.measure_acceptance("judge", "block").read_text())
    assert found["conditions"]["draft_tokens"] == count
    assert 1 <= found["tau_pooled"] <= count + 1


@pytest.mark.parametrize("case", ["dflash2", "dspark"])
def test_the_gate_after_training_passes_what_was_trained(block_states, case):
    road = road_of(block_states, case, steps=40, learning_rate=0.01, validate_every=20)
    road.train("block")
    gate = json.loads(road.check_drafter("block").read_text())
    assert gate["leaks"]["anchors_that_follow_states"] > 0


@pytest.mark.parametrize("precision", ["mixed", "bf16"])
@pytest.mark.parametrize("case", ["dflash2", "dspark", "dspark, rnn"])
def test_bfloat16_is_bfloat16_from_training_to_measuring(ready_road, config, case, precision):
    road = road_of(config, case, steps=2, validate_every=2, precision=precision)
    folder = road.train("block")
    weights = load_file(folder / "model.safetensors").values()
    assert {w.dtype for w in weights if w.is_floating_point()} == {torch.bfloat16}
    dtypes = json.loads((folder / "run.json").read_text())["record"]["dtypes"]
    assert dtypes["training loss"] == "float32"
    found = json.loads(road.measure_acceptance("judge", "block").read_text())
    assert found["record"]["dtypes"]["drafter logits in evaluation"] == "bfloat16"


@pytest.mark.parametrize("case", ["dflash2", "dspark"])
def test_layers_may_start_from_the_targets_own(block_states, case):
    road = road_of(block_states, case, steps=1, learning_rate=1e-12, validate_every=1)
    road.plan.config["drafters"]["block"]["initial_layers"] = [4, 5]
    folder = MiniRoad(road.plan.config).train("block")
    made = load_file(folder / "model.safetensors")
    target = load_file(Path(road.plan.config["target"]["path"]) / "model.safetensors")
    for own, index in ((0, 4), (1, 5)):
        part = "self_attn.q_proj.weight"
        expected = target[f"model.layers.{index}.{part}"].float()
        torch.testing.assert_close(made[f"layers.{own}.{part}"], expected)


@pytest.mark.parametrize("part", ["candidate_selector", "layers.0.mlp_conv"])
def test_every_part_of_dflash2_is_trained(model_of, part):
    assert trained(model_of("dflash2"), part)


@pytest.mark.parametrize("part", ["markov_head", "confidence_head"])
def test_every_head_of_dspark_is_trained(model_of, part):
    assert trained(model_of("dspark"), part)


def trained(model: Model, part: str) -> bool:
    """Whether every parameter of a part gets a gradient."""
    loss, _ = model.model(model.batch(model.samples, 384))
    loss.backward()
    parts = [p for n, p in model.drafter.named_parameters() if n.startswith(part)]
    return bool(parts) and all(p.grad is not None and p.grad.abs().sum() > 0 for p in parts)


@pytest.mark.parametrize("weights", [False, True])
def test_dflash2_counts_as_right_what_its_selector_would_choose(model_of, weights):
    """With a selector that has no say, its choice is the slot's own; else another one."""
    model = model_of("dflash2")
    if not weights:
        with torch.no_grad():
            model.drafter.candidate_selector.successor_codebook.zero_()
    blocks = model.model.blocks(model.batch(model.samples, 384))
    found = model.model.predictions(blocks)
    same = torch.equal(model.model.chosen(blocks, found), found.logits.argmax(-1))
    assert same != weights


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"conv_group_size": 24}, "conv_group_size is 24, but must divide the hidden size .* 64"),
        ({"selector_top_k": 1000}, "selector_top_k is 1000, but the target .* knows 512 tokens"),
    ],
)
def test_sizes_that_do_not_suit_the_target_are_refused(block_states, change, sentence):
    config = with_block_drafter(copy.deepcopy(block_states), **CASES["dflash2"] | change)
    road = MiniRoad(config)
    road.build_draft_vocab("block")
    with pytest.raises(DraftmillError, match=sentence):
        road.train("block")
