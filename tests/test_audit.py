"""The audit of a training step: with nothing planted, none of its checks fires, and it says what it saw."""

import dataclasses
import json

import pytest
import torch

import families
from draftmill import audit, block_targets, drafter_training, tables
from draftmill.errors import DraftmillError
from family_configs import TOKENS
from mini_road import MiniRoad, road_of, write_data
from workflow import of_algorithm, rows, tiny_config, with_block_drafter

SEEDS = ("gemma3", "qwen3_5_moe")


@pytest.fixture
def road(config, prepared_target) -> MiniRoad:
    road = road_of(with_block_drafter(config), prepared_target)
    for source in ("learn", "choose"):
        road.to_states(source)
    for drafter in ("small", "block"):
        road.build_draft_vocab(drafter)
    return road


@pytest.mark.parametrize("drafter", ["small", "block"])
def test_nothing_planted_passes_and_every_figure_is_written(road, drafter):
    found = json.loads(road.audit_training(drafter).read_text())
    checks = {check["name"]: check for check in found["checks"]}
    expected = {
        "batch",
        "layers",
        "vocabulary",
        "masks",
        "loss",
        "noise",
        "states",
        "documents",
        "packing",
    }
    expected |= {"attention", "rotary", "step 0", "frozen"}
    expected |= {"mask token"} if drafter == "block" else set()
    assert set(checks) == expected
    for check in checks.values():
        assert check["passed"]
        assert check["figures"]
    assert found["record"]["dtypes"]["drafter compute"] == "bfloat16"


def family_cases() -> list:
    slow = [pytest.param(n, marks=pytest.mark.slow) for n in families.NAMES if n not in SEEDS]
    return [*SEEDS, *slow]


@pytest.mark.parametrize("name", family_cases())
def test_with_nothing_planted_none_fires_on_any_family(name, family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data(rows(4), rows(2, 500), rows(2, 600))
    config = tiny_config(family(name))
    config["responses"]["max_new_tokens"] = 16
    road = MiniRoad(config)
    road.prepare_target()
    for source in ("learn", "choose"):
        road.to_states(source)
    road = MiniRoad(with_block_drafter(config, mask_token_id=absent(road)))
    for drafter in ("small", "block"):
        road.build_draft_vocab(drafter)
        found = json.loads(road.audit_training(drafter).read_text())
        assert all(check["passed"] for check in found["checks"])


def absent(road: MiniRoad) -> int:
    """A token that the data do not hold: random targets emit any."""
    tables_read = [tables.read(road.table("tokens", name)) for name in ("learn", "choose")]
    used = {token for table in tables_read for row in table for token in row["input_ids"]}
    return max({*range(TOKENS)} - used)


HEADS = {
    "dflash2": of_algorithm("dflash2"),
    "dflash2, dpace": of_algorithm("dflash2") | {"position_weights": "dpace"},
    "dspark": of_algorithm("dspark"),
    "dspark, dpace": of_algorithm("dspark") | {"position_weights": "dpace"},
    "dspark, gated": of_algorithm("dspark", markov_head_type="gated"),
    "dspark, rnn": of_algorithm("dspark", markov_head_type="rnn"),
    "dspark, own features": of_algorithm("dspark", confidence_head_with_markov=False),
    "dspark, no confidence": of_algorithm("dspark", enable_confidence_head=False),
}


@pytest.fixture
def road_with_heads(ready_road, config):
    def road(case: str) -> MiniRoad:
        changed = with_block_drafter(config)
        drafter = changed["drafters"]["block"]
        drafter |= HEADS[case]
        if weights := drafter.pop("position_weights", None):
            drafter["training"]["position_weights"] = weights
        made = MiniRoad(changed)
        made.build_draft_vocab("block")
        return made

    return road


@pytest.mark.parametrize("case", HEADS)
def test_block_drafters_with_further_heads_pass(road_with_heads, case):
    found = json.loads(road_with_heads(case).audit_training("block").read_text())
    checks = {check["name"]: check for check in found["checks"]}
    assert all(check["passed"] for check in checks.values())
    assert checks["loss"]["figures"]["fp32"]["error"] < 1e-5


def no_head_loss(patch) -> None:
    patch.setattr(block_targets.WithTargets, "forward", forward_without_head_loss)


def forward_without_head_loss(self, batch: dict):
    blocks = self.blocks(batch)
    found = self.predictions(blocks)
    losses = self.loss(found.logits[None], found.targets[None])[0]
    return (losses * found.weights).sum(), {"scored": blocks.scored.sum()}


def known_of_the_slot_itself(patch) -> None:
    """Heads are given the token that is to be drafted."""
    real = block_targets.WithTargets.blocks

    def wrong(self, batch: dict):
        blocks = real(self, batch)
        places = blocks.places.clamp(max=batch["input_ids"].shape[1] - 1)
        return dataclasses.replace(blocks, known=batch["input_ids"][0][places])

    patch.setattr(block_targets.WithTargets, "blocks", wrong)


@pytest.mark.parametrize("fault", [no_head_loss, known_of_the_slot_itself])
@pytest.mark.parametrize("case", ["dflash2", "dspark", "dspark, rnn"])
def test_a_fault_in_a_head_stops_the_run(road_with_heads, monkeypatch, fault, case):
    road = road_with_heads(case)
    monkeypatch.setattr(drafter_training, "prepare", spread_heads(drafter_training.prepare))
    fault(monkeypatch)
    with pytest.raises(DraftmillError, match="audit: loss: the step's loss is"):
        road.audit_training("block")


def spread_heads(prepare):
    """Heads that matter, as they do once trained: they start near zero."""

    def prepared(*arguments):
        training = prepare(*arguments)
        with torch.no_grad():
            for name, parameter in training.drafter.named_parameters():
                if name.startswith(("candidate_selector.", "markov_head.")):
                    parameter.copy_(torch.randn_like(parameter) * 0.5)
        return training

    return prepared


def test_a_check_that_stops_by_itself_fails_by_its_name_and_the_others_still_run(road, monkeypatch):
    def stopped(subject) -> dict:
        raise IndexError("index 9 is out of bounds")

    monkeypatch.setitem(audit.CHECKS, "masks", stopped)
    with pytest.raises(DraftmillError, match=r"^audit: masks: stopped by IndexError \(index 9"):
        road.audit_training("block")
