"""The audit of a training step: with nothing planted, none of its checks fires, and it says what it saw."""

import json

import pytest

import families
from draftmill import tables
from family_configs import TOKENS
from mini_road import MiniRoad, road_of, write_data
from workflow import rows, tiny_config, with_block_drafter

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
    expected = {"layers", "vocabulary", "masks", "loss", "noise", "states", "documents", "packing"}
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
