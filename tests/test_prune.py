"""Pruning: what no configured run needs is listed with its bytes, and deleted only on request."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from draftmill.driver.session import lock_of_run
from mini_road import MiniRoad, road_of
from workflow import PROJECT


@pytest.fixture
def road(config, prepared_target) -> MiniRoad:
    """Prompts of all sources and the target; a file of no run and one of a removed source."""
    Path("config.yaml").write_text(yaml.safe_dump(config))
    made = road_of(config, prepared_target)
    for source in ("learn", "choose", "judge"):
        made.prepare_prompts(source)
    for orphan in ("results/old/report.html", "results/tiny/prompts/removed/00000.parquet"):
        Path(orphan).parent.mkdir(parents=True)
        Path(orphan).write_text("12345")
    return made


def prune(*arguments: str) -> str:
    command = [sys.executable, str(PROJECT / "scripts/prune.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def files() -> set[str]:
    return {p.as_posix() for p in Path("results").rglob("*") if p.is_file()}


def test_orphans_are_listed_with_their_bytes_and_stay(road):
    before = files()
    listed = prune()
    assert "5 results/old/report.html" in listed
    assert "5 results/tiny/prompts/removed/00000.parquet" in listed
    assert "5 bytes in 1 files that configured runs do not need" in listed
    assert "5 bytes in 1 files of runs that no configuration names" in listed
    assert files() == before


def test_on_request_exactly_the_orphans_are_deleted(road):
    before = files()
    prune("--delete")
    assert before - files() == {"results/tiny/prompts/removed/00000.parquet"}
    prune("--other-runs", "--delete")
    assert "results/old/report.html" not in files()


def test_nothing_is_deleted_under_a_run_that_works(road):
    lock = lock_of_run(road.root)
    before = files()
    found = subprocess.run(
        [sys.executable, str(PROJECT / "scripts/prune.py"), "--delete"],
        capture_output=True,
        text=True,
    )
    os.close(lock)
    assert found.returncode != 0
    assert "another run is working here" in found.stderr
    assert files() == before


def test_a_run_that_cannot_be_planned_is_left_alone(road, config):
    config["sources"]["learn"]["path"] = "data/missing.jsonl"
    Path("config.yaml").write_text(yaml.safe_dump(config))
    listed = prune("--delete")
    assert "cannot be planned here, so its run is left alone" in listed
    assert "results/tiny/prompts/removed/00000.parquet" in files()


def test_stale_files_are_those_of_another_plan(road, config):
    assert "0 bytes in 0 files" in prune("--stale")
    config["sources"]["learn"]["on_malformed"] = "skip"
    Path("config.yaml").write_text(yaml.safe_dump(config))
    assert "results/tiny/prompts/learn/00000.parquet" in prune("--stale", "--delete")
    assert "results/tiny/prompts/learn/00000.parquet" not in files()
    assert "results/tiny/prompts/choose/00000.parquet" in files()
