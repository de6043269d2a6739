"""Jobs of several shards: one load of the target, the same bytes, and staleness shard by shard all the same."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.driver.shard_jobs import grouped, shards_per_job
from draftmill.errors import DraftmillError

SEVERAL = (
    "--set-resources",
    "extract_hidden_states:shards_per_job=3",
    "gate_hidden_states:shards_per_job=3",
)


def shards(count: int, capture: str = "low") -> list[tuple[str, str, str]]:
    return [(capture, f"source{i % 3}", f"{i:05d}") for i in range(count)]


@given(st.integers(0, 40), st.integers(0, 9), st.integers(1, 12))
def test_every_shard_that_is_not_alone_is_in_one_job_of_its_capture(low, high, size):
    everything = shards(low) + shards(high, "high")
    jobs = grouped(everything, size)
    members = [shard for job in jobs for shard in job]
    assert len(members) == len(set(members))
    assert all(1 < len(job) <= size and len({c for c, _, _ in job}) == 1 for job in jobs)
    alone = set(everything) - set(members)
    assert alone <= {s for s in everything if s[0] == "low"} | {
        s for s in everything if s[0] == "high"
    }
    assert len(alone) <= (2 if size > 1 else len(everything))


@pytest.mark.parametrize("value", [0, -2, "many", 1.5])
def test_a_number_of_shards_that_is_no_positive_integer_is_refused(value):
    settings = SimpleNamespace(
        _parsed_overwrite_resources={"extract_hidden_states": {"shards_per_job": value}}
    )
    with pytest.raises(DraftmillError, match="expected a positive integer"):
        shards_per_job(SimpleNamespace(resource_settings=settings), "extract_hidden_states")


@pytest.fixture(scope="module")
def several(finished_run, tmp_path_factory):
    """A finished run whose states and gates were deleted and made again, three shards a job."""
    run = finished_run.copy(tmp_path_factory.mktemp("several") / "run")
    before = {}
    for part in ("hidden_states/low", "gates/low"):
        for path in sorted(run.result(part).rglob("*/0*.*")):
            before[path] = path.read_bytes()
            path.unlink()
    assert len(before) == 8
    found = run.snakemake(*SEVERAL)
    return SimpleNamespace(run=run, before=before, output=found.stdout)


@pytest.mark.slow
def test_the_bytes_are_those_of_jobs_of_one_shard(several):
    for rule in ("extract_hidden_states", "gate_hidden_states"):
        assert f"rule {rule}_0:" in several.output
        assert f"rule {rule}_1:" not in several.output  # the fourth shard is alone
        assert several.output.count(f"rule {rule}:") >= 1
    for path, content in several.before.items():
        assert path.read_bytes() == content, path


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), SEVERAL], ids=["one", "several"])
def test_nothing_is_stale_afterwards_whatever_the_number(several, arguments):
    assert several.run.stale(*arguments) == {}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), SEVERAL], ids=["one", "several"])
def test_a_changed_row_stales_its_own_shard_alone(several, tmp_path, arguments):
    run = several.run.copy(tmp_path / "run")
    run.edit("data/learn.jsonl", "Number 3:", "Number three:")
    stale = run.stale(*arguments)
    assert stale["extract_hidden_states"] == stale["gate_hidden_states"] == 1
    assert not any(rule.endswith("_0") for rule in stale)


@pytest.mark.slow
def test_the_share_of_loading_is_written_and_warned_of(several):
    logs = several.run.folder / "logs/tiny/extract_hidden_states"
    found = json.loads((logs / "job_0.loading.json").read_text())
    assert 0 < found["loading"] < found["total"]
    assert "raise the resource shards_per_job of this rule" in (logs / "job_0.log").read_text()


@pytest.mark.slow
def test_resources_set_for_the_rule_reach_its_jobs_of_several_shards(several, tmp_path):
    run = several.run.copy(tmp_path / "run")
    for path in run.result("hidden_states/low").rglob("*/0*.parquet"):
        path.unlink()
    more = ("extract_hidden_states:backend=streamed", "extract_hidden_states:mem_mb=1234")
    run.snakemake(*SEVERAL, *more)
    log = (run.folder / "logs/tiny/extract_hidden_states/job_0.log").read_text()
    assert "backend: streamed" in log
    for path, content in several.before.items():
        assert path.read_bytes() == content, path
