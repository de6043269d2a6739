"""Training: losses, precisions, validation and learning rate are what they say."""

import copy
import json
from itertools import pairwise

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from draftmill.errors import DraftmillError
from draftmill.trainer import learning_rate
from mini_road import MiniRoad


@pytest.fixture
def road(ready_road) -> MiniRoad:
    return ready_road


def with_training(config: dict, **changes) -> dict:
    config = copy.deepcopy(config)
    config["drafters"]["small"]["training"] |= changes
    return config


def test_another_seed_gives_another_drafter(road, config):
    first = (road.train() / "model.safetensors").read_bytes()
    other = MiniRoad(with_training(config, seed=1))
    assert (other.train() / "model.safetensors").read_bytes() != first


@pytest.mark.parametrize(("precision", "weights"), [("mixed", "float32"), ("bf16", "bfloat16")])
def test_the_ledger_says_what_was_trained_and_exported(road, config, precision, weights):
    folder = MiniRoad(with_training(config, precision=precision)).train()
    run = json.loads((folder / "run.json").read_text())
    dtypes = run["record"]["dtypes"]
    assert dtypes["drafter weights in training"] == weights
    assert dtypes["drafter compute"] == "bfloat16"
    assert dtypes["training loss"] == "float32"
    tensors = load_file(folder / "model.safetensors")
    floating = {v.dtype for v in tensors.values() if v.is_floating_point()}
    assert floating == {torch.bfloat16}


@pytest.mark.parametrize("precision", ["mixed", "bf16"])
@pytest.mark.parametrize("loss", ["kl_div", "ce", "rkl", "jsd", "tv"])
def test_every_loss_trains_in_either_precision(road, config, loss, precision):
    changed = with_training(config, loss=loss, precision=precision, steps=2, validate_every=2)
    run = json.loads((MiniRoad(changed).train() / "run.json").read_text())
    assert run["record"]["dtypes"]["training loss"] == "float32"


def test_conversations_longer_than_a_batch_are_counted(road, config):
    run = json.loads(
        (MiniRoad(with_training(config, tokens_per_batch=40)).train() / "run.json").read_text()
    )
    assert run["cut_samples"] > 0


def test_loss_falls_and_the_best_validation_is_exported(road, config):
    folder = MiniRoad(with_training(config, steps=40, learning_rate=0.01)).train()
    rows = pq.read_table(folder / "metrics.parquet").to_pylist()
    losses = [r["loss"] for r in rows if r["kind"] == "train"]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    validations = {r["step"]: r["loss"] for r in rows if r["kind"] == "validation"}
    run = json.loads((folder / "run.json").read_text())
    assert run["best_validation_loss"] == min(validations.values())
    assert validations[run["best_step"]] == run["best_validation_loss"]


def test_accumulated_batches_see_the_tokens_of_as_many_steps(road, config):
    single = MiniRoad(with_training(config, steps=8, validate_every=8)).train()
    one = pq.read_table(single / "metrics.parquet").to_pylist()
    double = MiniRoad(
        with_training(config, steps=4, gradient_accumulation=2, validate_every=4)
    ).train()
    two = pq.read_table(double / "metrics.parquet").to_pylist()
    tokens = [sum(r["tokens"] for r in rows if r["kind"] == "train") for rows in (one, two)]
    assert tokens[0] == tokens[1]


def test_embedding_and_head_stay_the_targets_own(road):
    folder = road.train()
    head = load_file(road.head)
    made = load_file(folder / "model.safetensors")
    assert torch.equal(made["embed_tokens.weight"], head["embed_tokens.weight"])
    assert torch.equal(made["lm_head.weight"], head["lm_head.weight"][made["t2d"].bool()])


def test_a_loss_that_is_not_finite_stops_the_training(road, config):
    with pytest.raises(DraftmillError, match="not finite"):
        MiniRoad(with_training(config, learning_rate=1e30, max_grad_norm=1e30, steps=40)).train()


def test_learning_rate_warms_up_then_falls_to_its_final_ratio():
    settings = {
        "learning_rate": 2.0,
        "warmup_steps": 10,
        "steps": 100,
        "final_learning_rate_ratio": 0.1,
    }
    rates = [learning_rate(step, settings) for step in range(101)]
    assert rates[0] == pytest.approx(0.2, rel=1e-2)
    assert max(rates) == max(rates[8:12])
    assert rates[100] == pytest.approx(0.2)
    assert all(a >= b for a, b in pairwise(rates[10:]))


def test_the_shards_of_another_target_are_refused(road, config):
    manifest = json.loads(road.target.read_text())
    road.target.write_text(json.dumps(manifest | {"fingerprint": "0" * 16}))
    with pytest.raises(DraftmillError, match="carries the fingerprint 0000000000000000"):
        road.train()
