"""The configurations of real targets: their DAG and their cost, with no network and an empty hub cache."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import yaml

import plan
from draftmill.driver.config import completed
from draftmill.driver.default_layers import dflash_layers, eagle3_layers
from draftmill.driver.estimate import Options, estimate
from draftmill.driver.estimate_text import bytes_text
from draftmill.driver.plan import Plan
from draftmill.driver.token_estimate import Assumed
from draftmill.errors import DraftmillError
from workflow import PARTS, PROJECT, environment

TRAINED = ["kimi-k2.5-eagle3", "llama-3.1-8b-eagle3", "qwen3-8b", "qwen3.6-27b-dflash"]
NAMES = [*TRAINED, "evaluate-qwen3-8b"]
DEPTHS = {"kimi": 61, "llama": 32, "qwen3-": 36, "qwen3.6": 64, "evaluate-qwen3-8b": 36}
DEFAULTS = {"eagle3": eagle3_layers, "dflash": dflash_layers}


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
    for rule in ("prepare_target", "extract_hidden_states", *made_by(name), "report"):
        assert f"\n{rule} " in text, f"{name}: no {rule}"
    assert ("\nbuild_draft_vocab " in text) == (name in TRAINED)
    assert list(clone.parent.glob("cache/hub/*")) == []


def settled(name: str) -> dict:
    return completed(yaml.safe_load((PROJECT / f"configs/{name}.yaml").read_text()))


def made_by(name: str) -> set[str]:
    """The rules that make the drafters of a configuration."""
    plan = Plan(settled(name))
    return {plan.train_rule(drafter) for drafter in plan.config["drafters"]}


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
    assert (found["disk"]["total"] > 1e12) == (name in TRAINED), "training data are terabytes"
    assert (found["memory"]["training"] == {}) == (name not in TRAINED)
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
def test_the_drafters_read_the_default_layers_of_the_target(name, monkeypatch):
    monkeypatch.chdir(PROJECT)
    config = settled(name)
    depth = next(d for prefix, d in DEPTHS.items() if name.startswith(prefix))
    read = set()
    for drafter in config["drafters"].values():
        assert drafter["layers"]["output_of"] == DEFAULTS[drafter["algorithm"]](depth)
        read |= set(drafter["layers"]["output_of"])
    [capture] = config["hidden_states"]["captures"].values()
    assert set(capture["output_of"]) == read, "no layer is stored for nobody"


def figures(found: dict) -> set[str]:
    """Bytes of memory and disk, as the headers round them."""
    memory, disk = found["memory"], found["disk"]
    values = [memory["resident extraction"], disk["total"], *memory["training"].values()]
    values += [held["bytes"] for held in memory["streamed"].values()]
    texts = {bytes_text(value) for value in values}
    for unit, size in (("GB", 1e9), ("TB", 1e12)):
        texts |= {f"{value / size:.{digits}f} {unit}" for value in values for digits in (0, 1)}
    return texts


@pytest.mark.parametrize("name", NAMES)
def test_the_header_tells_what_its_command_prints(name, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(PROJECT)
    text = (PROJECT / f"configs/{name}.yaml").read_text()
    header = " ".join(re.findall(r"^# +(.*)$", text.partition("\nrun:")[0], re.M)).replace(
        "\\ ", ""
    )
    command = re.search(
        rf"scripts/plan.py (--configfile configs/{name}.yaml(?: --\S+ \d+)+)", header
    )[1]
    options = plan.options_of(plan.parser().parse_args(command.split()))
    found = estimate(Plan(settled(name)), options)
    told = re.findall(
        r"\d+(?:\.\d+)? [GT]B", header.partition("That says: ")[2].partition("Reading")[0]
    )
    assert len(told) >= 2
    assert set(told) <= figures(found)
    blocks = re.findall(r"(\d+) blocks in a packed row", header)
    assert {int(n) for n in blocks} <= set(found["memory"]["blocks of a row"].values())


def test_drafters_of_others_are_planned_from_a_folder_too(clone):
    """The hub's drafters stand at the same places on a local disk, as on a machine without a network."""
    name = clone / "configs/evaluate-qwen3-8b.yaml"
    config = yaml.safe_load(name.read_text())
    for drafter in config["drafters"].values():
        del drafter["hub"], drafter["revision"]
        folder = clone / "models" / drafter["algorithm"]
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"")
        drafter["path"] = str(folder)
    name.write_text(yaml.safe_dump(config))
    run = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--configfile", str(name)],
        cwd=clone,
        env=environment() | {"HF_HOME": str(clone.parent / "cache")},
        capture_output=True,
        text=True,
    )
    text = run.stdout + run.stderr
    assert run.returncode == 0, text[-3000:]
    assert re.search(r"^import_drafter +2$", text, re.M)
    assert "train" not in text.partition("Job stats:")[2].partition("total")[0]


def test_a_layer_past_the_copied_configuration_is_refused_while_planning(monkeypatch):
    monkeypatch.chdir(PROJECT)
    config = yaml.safe_load((PROJECT / "configs/qwen3-8b.yaml").read_text())
    config["hidden_states"]["captures"]["both"]["output_of"] = [1, 9, 17, 25, 32, 33, 36]
    with pytest.raises(DraftmillError, match="has 36 decoder layers"):
        completed(config)
