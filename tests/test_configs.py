"""The configurations of real targets: their DAG and their cost, with no network and an empty hub cache."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import yaml

from draftmill.driver.config import completed
from draftmill.driver.default_layers import dflash_layers, eagle3_layers
from draftmill.driver.estimate import Options, estimate
from draftmill.driver.plan import Plan
from draftmill.driver.token_estimate import Assumed
from draftmill.errors import DraftmillError
from workflow import PARTS, PROJECT, environment

NAMES = ["kimi-k2.5-eagle3", "llama-3.1-8b-eagle3", "qwen3-8b-eagle3", "qwen3.6-27b-dflash"]
DEPTHS = {"kimi": 61, "llama": 32, "qwen3-": 36, "qwen3.6": 64}


@pytest.fixture
def clone(tmp_path):
    """A fresh clone: the project without results, and its configurations."""
    ignored = shutil.ignore_patterns("__pycache__")
    for part in (*PARTS, "configs"):
        source, copy = PROJECT / part, tmp_path / "clone" / part
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=ignored)
        else:
            shutil.copy2(source, copy)
    return tmp_path / "clone"


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_dag_shows_without_a_download(clone, name):
    run = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--configfile", f"configs/{name}.yaml"],
        cwd=clone,
        env=environment() | {"HF_HOME": str(clone.parent / "cache")},
        capture_output=True,
        text=True,
    )
    text = run.stdout + run.stderr
    assert run.returncode == 0, text[-3000:]
    for rule in ("prepare_target", "extract_hidden_states", "train_eagle3", "report"):
        assert f"\n{rule} " in text, f"{name}: no {rule}"
    assert list(clone.parent.glob("cache/hub/*")) == []


def test_the_trillion_parameter_run_shows_jobs_of_several_shards_with_the_profile_it_names(clone):
    name = "configs/kimi-k2.5-eagle3.yaml"
    command = f"snakemake --cores 1 --configfile {name} --profile profiles/large-target"
    assert command in (PROJECT / name).read_text()
    run = subprocess.run(
        [sys.executable, "-m", *command.split(), "-n"],
        cwd=clone,
        env=environment() | {"HF_HOME": str(clone.parent / "cache")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    for rule, count in (("extract_hidden_states", 32), ("gate_hidden_states", 7)):
        jobs = set(re.findall(rf"^rule {rule}_\d+|^{rule}_\d+", run.stdout, re.M))
        per_job = profile()[rule]["shards_per_job"]
        assert len({job.removeprefix("rule ") for job in jobs}) == count, (
            f"254 shards, {per_job} a job"
        )
        assert f"backend=streamed, shards_per_job={per_job}" in run.stdout


def profile() -> dict:
    """rule -> the resources that profiles/large-target gives it."""
    path = PROJECT / "profiles/large-target/config.yaml"
    return yaml.safe_load(path.read_text())["set-resources"]


def test_the_trillion_parameter_run_fits_one_gpu_with_the_profile_it_names(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(PROJECT)
    config = completed(yaml.safe_load((PROJECT / "configs/kimi-k2.5-eagle3.yaml").read_text()))
    extraction, gate = (
        profile()[rule]["shards_per_job"]
        for rule in ("extract_hidden_states", "gate_hidden_states")
    )
    options = Options(Assumed(1000, 3000), shards_per_job=extraction, gate_shards_per_job=gate)
    streamed = estimate(Plan(config), options)["memory"]["streamed"]
    for rule, held in streamed.items():
        assert held["bytes"] < 141e9, rule
        assert held["bytes"] < profile()[rule]["mem_mb"] * 1e6
    assert gate > extraction


@pytest.mark.parametrize("name", NAMES)
def test_the_cost_is_planned_without_a_download(name, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(PROJECT)
    config = completed(yaml.safe_load((PROJECT / f"configs/{name}.yaml").read_text()))
    found = estimate(Plan(config), Options(Assumed()))
    assert found["disk"]["total"] > 1e12, "data of this size are terabytes"
    assert all(source["tokens"] > 0 for source in found["sources"].values())
    assert found["target"]["config"] == config["target"]["config"]
    assert list(tmp_path.iterdir()) == []


def test_planning_for_a_trillion_parameters_takes_less_than_2_gb_and_a_minute(clone):
    began = time.monotonic()
    command = [sys.executable, "scripts/plan.py", "--configfile", "configs/kimi-k2.5-eagle3.yaml"]
    alone = environment() | {"HF_HOME": str(clone.parent / "cache")}
    child = subprocess.Popen(command, cwd=clone, env=alone, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    assert usage.ru_maxrss < 2_000_000, "kB"
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("name", NAMES)
def test_the_captures_are_the_default_layers_of_the_target(name, monkeypatch):
    monkeypatch.chdir(PROJECT)
    config = completed(yaml.safe_load((PROJECT / f"configs/{name}.yaml").read_text()))
    depth = next(d for prefix, d in DEPTHS.items() if name.startswith(prefix))
    wanted = {"eagle3": eagle3_layers(depth), "dflash": dflash_layers(depth)}
    for capture, layers in config["hidden_states"]["captures"].items():
        assert layers["output_of"] == wanted[capture]


def test_a_layer_past_the_copied_configuration_is_refused_while_planning(monkeypatch):
    monkeypatch.chdir(PROJECT)
    config = yaml.safe_load((PROJECT / "configs/qwen3-8b-eagle3.yaml").read_text())
    config["hidden_states"]["captures"]["eagle3"]["output_of"] = [1, 17, 36]
    with pytest.raises(DraftmillError, match="has 36 decoder layers"):
        completed(config)
