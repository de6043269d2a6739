"""Faults that cost tau, planted one by one in the code that trains: the audit stops each and names it."""

import copy
import os

import pytest
from accelerate.state import AcceleratorState

from draftmill import (
    algorithms,
    audit,
    audit_checks,
    block_targets,
    capture,
)
from draftmill.errors import DraftmillError
from mini_road import MiniRoad, road_of, write_data
from planted import PLANTED, Planted
from workflow import rows, tiny_config, with_block_drafter


@pytest.fixture(scope="module")
def made(prepared_target, tiny_target, tmp_path_factory):
    """A folder in which everything that an audit needs stands, and its configuration."""
    folder, before = tmp_path_factory.mktemp("planted"), os.getcwd()
    os.chdir(folder)
    try:
        write_data(rows(6), rows(3, 500), rows(3, 600))
        config = with_block_drafter(tiny_config(tiny_target))
        road = road_of(config, prepared_target)
        for source in ("learn", "choose"):
            road.to_states(source)
        for drafter in ("small", "block"):
            road.build_draft_vocab(drafter)
    finally:
        os.chdir(before)
    return folder, config


def failure_of(road: MiniRoad, drafter: str, check: str) -> str | None:
    """What one check of the audit says."""
    AcceleratorState._reset_state()  # one process trains in several precisions
    name = road.plan.algorithm(drafter)
    algorithm, companion = algorithms.load(name), algorithms.load(name, "audited_")
    options = road.training("audit_training", drafter, road.root / "gates/audit/x.json")
    subject = audit.opened(options, algorithm, companion)
    return audit_checks.run(check, audit.checks_of(companion)[check], subject).failure


def edited(config: dict, drafter: str, changes: dict) -> dict:
    config = copy.deepcopy(config)
    for key, value in changes.items():
        place, _, last = key.rpartition(".")
        section = config["drafters"][drafter]
        (section[place] if place else section)[last] = value
    return config


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: f"{fault.drafter}: {fault.name}")
def test_the_audit_names_the_planted_fault(fault: Planted, made, monkeypatch):
    folder, config = made
    monkeypatch.chdir(folder)
    road = MiniRoad(edited(config, fault.drafter, fault.changes))
    road.build_draft_vocab(fault.drafter)  # which lacks the mask token
    assert failure_of(road, fault.drafter, fault.check) is None or fault.changes
    fault.plant(monkeypatch)
    failure = failure_of(road, fault.drafter, fault.check)
    assert failure is not None
    assert failure.startswith(f"audit: {fault.check}: ")
    assert fault.says in failure


def test_a_failed_audit_stops_and_writes_nothing(made, monkeypatch):
    folder, config = made
    monkeypatch.chdir(folder)
    road = MiniRoad(config)
    road.build_draft_vocab("block")
    monkeypatch.setattr(block_targets, "gamma_of", lambda block: 1e9)
    with pytest.raises(DraftmillError, match=r"^audit: loss: the step's loss is"):
        road.audit_training("block")
    assert not (road.root / "gates/audit/block.json").exists()


def test_states_stored_after_the_final_norm_are_stopped_by_the_gate_and_by_the_audit(
    family, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_data(rows(4), rows(3, 500), rows(2, 600))
    road = MiniRoad(with_block_drafter(tiny_config(family("qwen3"))))
    road.prepare_target()

    def norm_hook(self, module, args, output) -> None:
        if (found := capture._found.get()) is not None:
            found["normed"], found["last"] = output, self.keep(output)

    with monkeypatch.context() as patched:
        patched.setattr(capture.Capture, "_norm_hook", norm_hook)
        for source in ("learn", "choose"):
            road.to_states(source)
    with pytest.raises(DraftmillError, match="states stored after the final norm"):
        road.gate_hidden_states("learn")
    for drafter in ("small", "block"):
        road.build_draft_vocab(drafter)
        assert "with it never" in failure_of(road, drafter, "layers")
