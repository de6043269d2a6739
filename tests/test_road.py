"""The whole road on the tiny target: what a finished run leaves, and how its sources grow."""

import copy
import hashlib
import json
import re
import shutil

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow


def digests(run, pattern: str) -> dict[str, str]:
    files = sorted(run.result("").glob(pattern))
    return {
        str(f): hashlib.sha256(f.read_bytes()).hexdigest() + str(f.stat().st_mtime_ns)
        for f in files
    }


def test_the_outputs_stand_where_the_readme_says(finished_run):
    for name in (
        "target/manifest.json",
        "target/head.safetensors",
        "prompts/learn/00000.parquet",
        "responses/learn/00001.parquet",
        "tokens/judge/00000.parquet",
        "hidden_states/low/learn/00000.parquet",
        "hidden_states/low/learn/manifest.json",
        "gates/low/judge/00000.json",
        "gates/leaks.json",
        "draft_vocab/small.safetensors",
        "drafters/small/config.json",
        "drafters/small/model.safetensors",
        "drafters/small/metrics.parquet",
        "drafters/small/run.json",
        "acceptance/small/judge.json",
        "figures/training.svg",
        "report.html",
        "summary.tsv",
    ):
        assert finished_run.result(name).stat().st_size > 0, name
    assert finished_run.leftovers() == []


def test_tau_is_stated_both_ways_per_position_and_per_category(finished_run):
    found = json.loads(finished_run.result("acceptance/small/judge.json").read_text())
    emitted = [step for r in found["per_response"] for step in r["emitted"]]
    assert found["tau_pooled"] == pytest.approx(sum(emitted) / len(emitted))
    means = [sum(r["emitted"]) / len(r["emitted"]) for r in found["per_response"]]
    assert found["tau_mean_of_means"] == pytest.approx(sum(means) / len(means))
    assert len(found["acceptance_per_position"]) == 3
    assert set(found["categories"]) == {"short", "long"}
    low, high = found["tau_pooled_interval"]
    assert low <= found["tau_pooled"] <= high


def test_every_record_names_versions_settings_and_dtypes(finished_run):
    for name in ("drafters/small/run.json", "acceptance/small/judge.json", "target/manifest.json"):
        record = json.loads(finished_run.result(name).read_text())["record"]
        assert record["versions"]["torch"]
        assert json.loads(record["settings"])["code"]
        assert record["dtypes"]
    run = json.loads(finished_run.result("drafters/small/run.json").read_text())
    assert run["record"]["dtypes"]["drafter weights in training"] == "float32"
    assert run["record"]["dtypes"]["drafter compute"] == "bfloat16"
    assert run["record"]["dtypes"]["exported checkpoint"] == "bfloat16"


def test_the_report_is_one_file_that_needs_no_network(finished_run):
    html = finished_run.result("report.html").read_text()
    for heading in ("tau", "Acceptance per draft position", "Training", "dtype ledger", "Gates"):
        assert f"<h2>{heading}</h2>" in html
    assert html.count("<svg") == 2
    loaded = re.findall(r"(?:src|href)\s*=\s*[\"'](?!#)", html)
    assert not loaded, "the page loads something"


def test_metrics_hold_every_step_and_every_validation(finished_run):
    rows = pq.read_table(finished_run.result("drafters/small/metrics.parquet")).to_pylist()
    assert [r["step"] for r in rows if r["kind"] == "train"] == list(range(1, 13))
    assert [r["step"] for r in rows if r["kind"] == "validation"] == [4, 8, 12]


@pytest.fixture
def grown(finished_run, tmp_path):
    run = finished_run.copy(tmp_path / "run")
    run.write_data(learn=40)
    return run


def with_limit(run, limit: int) -> None:
    config = copy.deepcopy(run.config)
    config["sources"]["learn"]["limit"] = limit
    run.write_config(config)


def test_raising_a_limit_keeps_full_shards_and_rebuilds_a_partial_one(grown):
    with_limit(grown, 10)
    grown.snakemake()
    before = digests(grown, "*/learn/00000.parquet") | digests(
        grown, "hidden_states/low/learn/00000*"
    )
    with_limit(grown, 40)
    stale = grown.stale()
    # shards 1 to 3 of the source; the second was left by the finished run, which had 20 rows
    assert stale["prepare_prompts"] == stale["extract_hidden_states"] == 2
    with_limit(grown, 15)
    grown.snakemake("results/tiny/tokens/learn/00001.parquet")
    with_limit(grown, 40)
    stale = grown.stale()
    assert stale["prepare_prompts"] == stale["extract_hidden_states"] == 3
    grown.snakemake("--until", "gate_hidden_states")
    after = digests(grown, "*/learn/00000.parquet") | digests(
        grown, "hidden_states/low/learn/00000*"
    )
    assert before == after


def test_without_snakemakes_records_a_module_change_is_refused_then_rebuilt(finished_run, tmp_path):
    clone = finished_run.copy(tmp_path / "clone")
    shutil.rmtree(clone.folder / ".snakemake")
    shutil.rmtree(clone.folder / ".draftmill")
    assert clone.stale() == {}
    clone.edit("scripts/draftmill/repetition.py", "repeated / total", "1.0 * repeated / total")
    refused = clone.snakemake("--dry-run", check=False)
    assert refused.returncode != 0
    assert "acceptance/small/judge.json" in refused.stdout
    assert "prune.py --stale --delete" in refused.stdout
    import subprocess
    import sys

    from workflow import environment

    command = [
        sys.executable,
        "scripts/prune.py",
        "--stale",
        "--delete",
        "--configfile",
        "config.yaml",
    ]
    subprocess.run(command, cwd=clone.folder, env=environment(), check=True)
    assert set(clone.stale()) == {"measure_acceptance", "plot", "report"}


def test_states_are_deleted_after_use_when_they_are_not_to_be_kept(finished_run, tmp_path):
    run = finished_run.copy(tmp_path / "run")
    config = copy.deepcopy(run.config)
    config["hidden_states"] |= {"keep_states": False, "batch_tokens": 512}
    run.write_config(config)
    run.snakemake()
    assert list(run.result("hidden_states").rglob("*.parquet")) == []
    assert run.result("hidden_states/low/learn/manifest.json").is_file()
    assert run.stale() == {}
