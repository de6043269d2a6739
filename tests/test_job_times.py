"""What the report says of the jobs' time: only jobs of the run as it is now count."""

import json
import os
import re
from pathlib import Path

import jinja2
import pytest

import extract_hidden_states
import gate_hidden_states
import report
from draftmill import job_times, loading_share
from mini_road import road_of

HEADER = "s\tmax_rss\tcpu_time\n"
SETTINGS = {
    "captured": [["low", "learn"], ["low", "judge"]],
    "trained": ["small"],
    "sources": [["learn", 3], ["judge", 1]],
    "tests": ["judge"],
    "generated": ["learn"],
}
RUNS = [
    {"name": "small", "record": {"rule": "train_eagle3"}},
    {"name": "taken", "record": {"rule": "import_drafter"}},
]
THREE = ["learn/00000", "learn/00001", "learn/00002"]
clock = iter(range(1_000_000_000, 2_000_000_000))


def shard(name: str) -> Path:
    return Path("results/tiny/hidden_states/low") / f"{name}.parquet"


def job(logs: Path, rule: str, name: str, shards=None, loading=1.0, total=20.0, backend="resident"):
    """Writes what a job leaves, later than every job before it."""
    folder = logs / rule
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.tsv").write_text(f"{HEADER}{total}\t100\t{total / 2}\n")
    if shards is not None:
        path = folder / f"{name}.loading.json"
        loading_share.write(path, loading, total, backend, [shard(s) for s in shards])
        now = next(clock)
        os.utime(path, (now, now))


@pytest.fixture
def logs(tmp_path) -> Path:
    return tmp_path / "logs"


def extraction(logs: Path) -> dict:
    [found] = job_times.loading(logs, SETTINGS)
    return found


def test_loading_is_summed_over_the_jobs_of_the_rule(logs):
    job(logs, "extract_hidden_states", "low.learn.00000.and_2_more", THREE, 4.0, 30.0, "streamed")
    job(logs, "extract_hidden_states", "low.judge.00000", ["judge/00000"], 0.0, 10.0)
    found = extraction(logs)
    assert (found["rule"], found["jobs"]) == ("extract_hidden_states", 2)
    assert (found["seconds"], found["share"]) == (4.0, pytest.approx(0.1))
    assert found["backend"] == "resident, streamed"
    assert found["warning"] is None, "10 % is not more than 10 %"


def test_a_share_over_ten_percent_of_all_jobs_is_warned_of_with_the_rules_name(logs):
    job(logs, "gate_hidden_states", "low.learn.00000.and_2_more", THREE, 1.0, 2.0)
    [found] = job_times.loading(logs, SETTINGS)
    assert found["share"] == pytest.approx(0.5)
    assert "50% of the time of gate_hidden_states" in found["warning"]
    assert "--set-resources gate_hidden_states:shards_per_job=N" in found["warning"]
    assert job_times.warnings(str(logs), SETTINGS["captured"], SETTINGS["sources"]) == [
        found["warning"]
    ]


@pytest.mark.parametrize("gone", ["removed/00000", "learn/00003", "judge/00001"])
def test_jobs_of_removed_sources_and_shards_do_not_count(logs, gone):
    job(logs, "extract_hidden_states", "now", THREE, 1.0)
    job(logs, "extract_hidden_states", "before", [gone], 19.0)
    assert (extraction(logs)["jobs"], extraction(logs)["seconds"]) == (1, 1.0)


def test_jobs_of_a_removed_capture_do_not_count(logs):
    job(logs, "extract_hidden_states", "now", THREE, 1.0)
    other = SETTINGS | {"captured": [["high", "learn"]]}
    assert job_times.loading(logs, other) == []


def test_of_a_shard_that_was_made_again_in_other_company_the_last_job_counts(logs):
    job(logs, "extract_hidden_states", "low.learn.00000.and_2_more", THREE, 5.0)
    for name in THREE[:2]:
        job(logs, "extract_hidden_states", f"low.{name}".replace("/", "."), [name], 1.0)
    assert (extraction(logs)["jobs"], extraction(logs)["seconds"]) == (3, 7.0)
    job(logs, "extract_hidden_states", "low.learn.00002", THREE[2:], 1.0)
    assert (extraction(logs)["jobs"], extraction(logs)["seconds"]) == (3, 3.0)


def test_timings_leave_out_what_the_run_no_longer_has(logs):
    job(logs, "prepare_prompts", "learn.00000")
    job(logs, "prepare_prompts", "learn.00003")
    job(logs, "generate_responses", "judge.00000")  # its answers are given now
    job(logs, "train_eagle3", "removed")
    job(logs, "train_eagle3", "small", total=7.0)
    job(logs, "train_dflash", "small")  # it was of another algorithm once
    job(logs, "import_drafter", "taken")
    job(logs, "build_draft_vocab", "taken")  # it was trained once
    job(logs, "audit_training", "small")
    job(logs, "audit_training", "taken")
    job(logs, "check_drafter", "taken")
    job(logs, "check_drafter", "removed")
    job(logs, "measure_acceptance", "small.learn")
    job(logs, "measure_acceptance", "small.judge")
    job(logs, "extract_hidden_states", "low.learn.00000.and_2_more", THREE)
    job(logs, "extract_hidden_states", "low.removed.00000", ["removed/00000"])
    job(logs, "report", "all")
    rows = {row["rule"]: row for row in job_times.timings(logs, SETTINGS, RUNS)}
    assert {rule: row["jobs"] for rule, row in rows.items()} == {
        "prepare_prompts": 1,
        "extract_hidden_states": 1,
        "audit_training": 1,
        "train_eagle3": 1,
        "import_drafter": 1,
        "check_drafter": 1,
        "measure_acceptance": 1,
    }
    assert rows["train_eagle3"] == {
        "rule": "train_eagle3",
        "jobs": 1,
        "wall": 7.0,
        "cpu": 3.5,
        "memory": 100.0,
    }


def test_a_job_too_short_for_a_measurement_counts_as_nothing(logs):
    job(logs, "plot", "all")
    (logs / "plot/all.tsv").write_text(f"{HEADER}NA\t-\tNA\n")
    [found] = job_times.timings(logs, SETTINGS, RUNS)
    assert (found["jobs"], found["wall"], found["memory"]) == (1, 0.0, 0.0)


def test_the_scripts_write_the_backend_they_took_and_the_shards_they_made(config, prepared_target):
    road = road_of(config, prepared_target)
    road.prepare_prompts("choose")
    road.generate_responses("choose")
    road.tokenize_conversations("choose")
    at = {"capture": "low", "source": "choose", "shard": "00000"}
    tokens, states = road.table("tokens", "choose", "00000"), road.states("choose")
    shards = [(road.stage("extract_hidden_states", **at), tokens, states)]
    extract_hidden_states.extract(shards, road.target, "streamed", Path("extract.json"))
    gate = road.root / "gates/low/choose/00000.json"
    shards = [(road.stage("gate_hidden_states", **at), tokens, states, gate)]
    gate_hidden_states.check(shards, road.target, road.head, "auto", Path("gate.json"))
    for name, backend in (("extract", "streamed"), ("gate", "resident")):
        found = json.loads(Path(f"{name}.json").read_text())
        assert found["backend"] == backend
        assert found["shards"] == ["low/choose/00000"]
        assert 0 < found["loading"] < found["total"]


def test_the_page_shows_the_share_and_the_warning(logs):
    job(logs, "extract_hidden_states", "low.learn.00000.and_2_more", THREE, 5.0, 20.0, "streamed")
    text = report.TEMPLATE.read_text(encoding="utf-8")
    section = text[text.index("<h3>Loading the target</h3>") : text.index("<h2>Provenance</h2>")]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["percent"] = lambda x: f"{x:.1%}"
    page = environment.from_string(section).render(loading=job_times.loading(logs, SETTINGS))
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page)
    assert cells == ["extract_hidden_states", "1", "5.0", "25.0%", "streamed"]
    assert "of the time of extract_hidden_states went into loading the target" in page


def test_the_empty_file_of_a_job_that_was_killed_counts_as_none(logs):
    """Snakemake makes a job's log files when it starts; a killed job leaves them empty."""
    job(logs, "extract_hidden_states", "low.learn.00000.and_2_more", THREE, 1.0)
    (logs / "extract_hidden_states/low.learn.00000.and_3_more.loading.json").touch()
    assert extraction(logs)["jobs"] == 1
