"""The whole road on the tiny target: what a finished run leaves, and how its sources grow."""

import copy
import hashlib
import json
import re
import shutil
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from workflow import environment

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
        "gates/audit/small.json",
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
    headings = ("tau", "Acceptance per draft position", "Training", "dtype ledger", "Gates")
    for heading in (*headings, "Sources", "Timings", "Provenance"):
        assert f"<h2>{heading}</h2>" in html
    assert html.count("<svg") == 2
    found = json.loads(finished_run.result("acceptance/small/judge.json").read_text())
    low, high = found["tau_pooled_interval"]
    assert f"{found['tau_pooled']:.3f}" in html
    assert f"{low:.2f} to {high:.2f}" in html
    for rule in ("generate_responses", "train_eagle3", "measure_acceptance"):
        assert f"<td>{rule}</td>" in html, "timings of every rule"
    assert found["fingerprint"] in html
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


PER_SHARD = (
    "prepare_prompts",
    "generate_responses",
    "tokenize_conversations",
    "extract_hidden_states",
    "gate_hidden_states",
)


@pytest.mark.parametrize(("before", "rebuilt"), [(10, 3), (15, 3)])
def test_raising_a_limit_to_40_builds_three_shards_and_leaves_the_first(grown, before, rebuilt):
    """From 10 rows, one full shard: three new ones. From 15, also the partial second again."""
    with_limit(grown, before)
    for left in grown.result("").rglob("learn/*.*"):
        left.unlink()
    grown.snakemake("--until", "gate_hidden_states")
    first = digests(grown, "*/learn/00000.parquet") | digests(grown, "*/low/learn/00000.*")
    assert len(first) == 5
    with_limit(grown, 40)
    stale = grown.stale()
    assert {rule: stale[rule] for rule in PER_SHARD} == dict.fromkeys(PER_SHARD, rebuilt)
    grown.snakemake("--until", "gate_hidden_states")
    assert first == digests(grown, "*/learn/00000.parquet") | digests(grown, "*/low/learn/00000.*")
    assert len(list(grown.result("tokens/learn").iterdir())) == 4


CLONE_CASES = [
    ("repetition", "repeated / total", "1.0 * repeated / total", "acceptance/small/judge.json"),
    ("shard_writer", "1 << 20", "1 << 19", "hidden_states/low/learn/00000.parquet"),
    ("draft_vocab", "taken = set(chosen)", "taken = {*chosen}", "draft_vocab/small.safetensors"),
]


@pytest.mark.parametrize(("module", "old", "new", "named"), CLONE_CASES)
def test_in_a_clone_without_records_a_module_change_is_refused_then_rebuilt(
    finished_run, tmp_path, module, old, new, named
):
    clone = finished_run.copy(tmp_path / "clone")
    shutil.rmtree(clone.folder / ".snakemake")
    shutil.rmtree(clone.folder / ".draftmill")
    assert clone.stale() == {}
    clone.edit(f"scripts/draftmill/{module}.py", old, new)
    refused = clone.snakemake("--dry-run", check=False)
    assert refused.returncode != 0
    assert named in refused.stdout or " ..." in refused.stdout
    assert "prune.py --stale --delete" in refused.stdout
    command = [
        sys.executable,
        "scripts/prune.py",
        "--stale",
        "--delete",
        "--configfile",
        "config.yaml",
    ]
    subprocess.run(command, cwd=clone.folder, env=environment(), check=True)
    assert not clone.result(named).exists()
    assert "measure_acceptance" in clone.stale()


def test_results_of_other_code_copied_over_ones_own_are_refused(finished_run, tmp_path):
    other = finished_run.copy(tmp_path / "other")
    other.edit("scripts/draftmill/repetition.py", "repeated / total", "1.0 * repeated / total")
    other.snakemake()
    mine = finished_run.copy(tmp_path / "mine")
    shutil.copytree(other.result(""), mine.result(""), dirs_exist_ok=True)
    refused = mine.snakemake("--dry-run", check=False)
    assert refused.returncode != 0
    assert "acceptance/small/judge.json" in refused.stdout


def test_states_are_deleted_after_use_when_they_are_not_to_be_kept(finished_run, tmp_path):
    run = finished_run.copy(tmp_path / "run")
    config = copy.deepcopy(run.config)
    config["hidden_states"] |= {"keep_states": False, "batch_tokens": 512}
    run.write_config(config)
    run.snakemake()
    assert list(run.result("hidden_states").rglob("*.parquet")) == []
    assert run.result("hidden_states/low/learn/manifest.json").is_file()
    assert run.stale() == {}
