"""Jobs of several shards: which shards they take, and that nobody can tell afterwards."""

import copy
import hashlib
import json
import shutil
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.driver import shard_jobs
from draftmill.driver.provenance import record_of, settings_in
from draftmill.errors import DraftmillError

PROFILE = ("--profile", "profiles/large-target")


def workflow_with(value) -> types.SimpleNamespace:
    settings = {"extract_hidden_states": {"shards_per_job": value}}
    resources = types.SimpleNamespace(_parsed_overwrite_resources=settings)
    return types.SimpleNamespace(resource_settings=resources)


def test_without_the_resource_a_job_makes_one_shard():
    assert shard_jobs.shards_per_job(workflow_with(4), "gate_hidden_states") == 1
    assert shard_jobs.shards_per_job(workflow_with(4), "extract_hidden_states") == 4


@pytest.mark.parametrize("value", [0, -1, 201, "all", 2.5])
def test_another_value_than_an_integer_in_bounds_is_refused(value):
    with pytest.raises(DraftmillError, match="shards_per_job of extract_hidden_states is"):
        shard_jobs.shards_per_job(workflow_with(value), "extract_hidden_states")


def test_shards_of_one_capture_are_put_together_over_sources_and_none_is_alone():
    low = [("low", "learn", "0"), ("low", "learn", "1"), ("low", "judge", "0")]
    high = [("high", "learn", "0")]
    assert shard_jobs.grouped([*low, *high], 2) == [low[:2]]
    assert shard_jobs.grouped([*low, *high], 3) == [low]
    assert shard_jobs.grouped([*low, *high], 1) == []


@given(st.integers(0, 40), st.integers(0, 9), st.integers(1, 12))
def test_no_shard_is_twice_in_jobs_and_every_job_is_of_one_capture(low, high, size):
    shards = [("low", f"source{i % 3}", f"{i:05d}") for i in range(low)]
    shards += [("high", "source", f"{i:05d}") for i in range(high)]
    jobs = shard_jobs.grouped(shards, size)
    members = [shard for job in jobs for shard in job]
    assert len(members) == len(set(members))
    assert all(1 < len(job) <= size and len({c for c, _, _ in job}) == 1 for job in jobs)
    assert len(set(shards) - set(members)) <= (2 if size > 1 else len(shards))


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Writes Snakemake's record of a shard and gives it back as it is after settling."""
    monkeypatch.chdir(tmp_path)

    def settled(params: list) -> dict:
        file = record_of("states/a.parquet")
        file.parent.mkdir(parents=True, exist_ok=True)
        before = {"params": list(map(repr, params)), "input": ["all"], "rule": "extract_0"}
        file.write_text(json.dumps(before | {"code": "kept"}))
        shard_jobs.settle("states/a.parquet", "extract", "{mine}", ["z", "b"])
        return json.loads(file.read_text())

    return settled


def test_the_record_of_a_shard_among_several_becomes_that_of_one(record):
    found = record([["{other}", "{mine}"]])
    assert found == {"params": ["'{mine}'"], "input": ["b", "z"], "rule": "extract", "code": "kept"}
    assert settings_in(found) == ["{mine}"]


@pytest.mark.parametrize("params", [["{mine}"], [["{other}", "{another}"]], []])
def test_other_records_stay_as_they_are(record, params):
    assert record(params)["rule"] == "extract_0"


def test_a_shard_without_a_record_gets_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shard_jobs.settle("states/a.parquet", "extract", "{mine}", [])
    assert not Path(".snakemake").exists()


def digests(run) -> dict[str, str]:
    files = sorted(run.result("hidden_states").rglob("*.parquet"))
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.mark.slow
def test_shards_made_together_have_the_same_bytes_and_are_fresh_in_any_company(
    finished_run, tmp_path
):
    run = finished_run.copy(tmp_path / "run")
    before = digests(run)
    shutil.rmtree(run.result("hidden_states"))
    shutil.rmtree(run.result("gates/low"))
    found = run.snakemake(*PROFILE)
    assert "of the time of extract_hidden_states went into loading the target" in found.stdout
    assert digests(run) == {
        k.replace(str(finished_run.folder), str(run.folder)): v for k, v in before.items()
    }
    logs = {path.name for path in (run.folder / "logs/tiny/extract_hidden_states").iterdir()}
    assert "low.learn.00000.and_3_more.loading.json" in logs
    assert run.stale() == {}
    assert run.stale(*PROFILE) == {}
    run.write_data(learn=40)
    stale = run.stale(*PROFILE)
    assert {n: c for n, c in stale.items() if n.startswith("extract")} == {
        "extract_hidden_states_0": 1
    }
    text = run.snakemake("--dry-run", *PROFILE).stdout
    outputs = text[text.index("rule extract_hidden_states_0:") :].partition("output: ")[2]
    shards = [Path(p).stem for p in outputs.partition("\n")[0].split(", ")]
    assert shards == ["00002", "00003"], "fresh shards stay out"


@pytest.mark.slow
def test_a_changed_setting_is_seen_after_shards_were_made_together(finished_run, tmp_path):
    run = finished_run.copy(tmp_path / "run")
    config = copy.deepcopy(run.config)
    config["hidden_states"]["batch_tokens"] = 512
    run.write_config(config)
    run.snakemake(*PROFILE)
    assert run.stale() == {}
    run.write_config(finished_run.config)
    assert run.stale()["extract_hidden_states"] == 4


@pytest.mark.slow
def test_temporary_shards_that_were_used_are_stale_in_no_company(finished_run, tmp_path):
    run = finished_run.copy(tmp_path / "run")
    config = copy.deepcopy(run.config)
    config["hidden_states"]["keep_states"] = False
    run.write_config(config)
    shutil.rmtree(run.result("hidden_states"))
    shutil.rmtree(run.result("gates/low"))
    run.snakemake(*PROFILE)
    assert not list(run.result("hidden_states").rglob("0*.parquet"))
    assert run.stale() == {}
    assert run.stale(*PROFILE) == {}
