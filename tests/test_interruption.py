"""A run that is interrupted at five points ends with the bytes of one that was not."""

import json
import os
import signal
import subprocess
import time

import psutil
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from workflow import Run, environment, tiny_config, with_block_drafter

pytestmark = pytest.mark.slow

COMPARED = (
    "drafters/small/model.safetensors",
    "drafters/small/config.json",
    "drafters/small/metrics.parquet",
    "drafters/small/run.json",
    "acceptance/small/judge.json",
    "drafters/block/model.safetensors",
    "drafters/block/metrics.parquet",
    "drafters/block/run.json",
    "acceptance/block/judge.json",
    "hidden_states/low/learn/00000.parquet",
)
# what has to exist for a run to have reached a point: in the middle of a stage each
POINTS = (
    "logs/tiny/generate_responses/learn.00000.log",
    "logs/tiny/extract_hidden_states/low.learn.00000.log",
    "logs/tiny/gate_hidden_states/low.learn.00001.log",
    "results/tiny/.resume",
    "logs/tiny/measure_acceptance/small.judge.log",
)


def longer(target) -> dict:
    """The tiny run with a drafter of either algorithm, their training long enough to be caught in the middle."""
    config = with_block_drafter(tiny_config(target))
    for drafter in config["drafters"].values():
        drafter["training"]["steps"] = 60
    return config


@pytest.fixture(scope="module")
def uninterrupted(tiny_target, tmp_path_factory) -> dict[str, bytes]:
    run = Run(tmp_path_factory.mktemp("straight") / "run", longer(tiny_target))
    run.write_data()
    run.snakemake()
    return {name: run.result(name).read_bytes() for name in COMPARED}


def interrupt_at(run: Run, point: str, number: int) -> int:
    """Starts the run, sends the signal to its driver once the point is reached; the exit status."""
    driver = subprocess.Popen(
        run.command(),
        cwd=run.folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    reached = run.folder / point
    deadline = time.monotonic() + 240
    while not (any(reached.iterdir()) if reached.is_dir() else reached.exists()):
        assert driver.poll() is None, f"the run ended before {point}"
        assert time.monotonic() < deadline, f"{point} was not reached"
        time.sleep(0.02)
    children = psutil.Process(driver.pid).children(recursive=True)
    os.kill(driver.pid, number)
    status = driver.wait(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == [], "jobs outlived the driver"
    return status


def assert_whole(run: Run) -> None:
    """Every file under a final name can be read as what it is."""
    for path in run.result("").rglob("*"):
        if path.is_dir() or path.name.startswith("."):
            continue
        if path.suffix == ".parquet":
            pq.read_table(path, page_checksum_verification=True)
        elif path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_at_five_points_it_ends_with_the_same_bytes(
    number, uninterrupted, tiny_target, tmp_path
):
    run = Run(tmp_path / "run", longer(tiny_target))
    run.write_data()
    for point in POINTS:
        status = interrupt_at(run, point, number)
        assert status != 0, f"exit status 0 for unfinished work at {point}"
        assert not run.result("report.html").exists()
        assert run.leftovers() == []
        assert_whole(run)
    run.snakemake()
    for name, content in uninterrupted.items():
        assert run.result(name).read_bytes() == content, name
    assert not any(run.result(".resume").iterdir())


def test_a_second_start_on_the_same_run_is_refused_while_the_first_works(tiny_target, tmp_path):
    run = Run(tmp_path / "run", longer(tiny_target))
    run.write_data()
    first = subprocess.Popen(
        run.command(),
        cwd=run.folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not (run.folder / "results/tiny/.plan.json").exists():
            assert first.poll() is None
            time.sleep(0.05)
        second = run.snakemake(check=False)
        assert second.returncode != 0
        assert "another run is working here" in second.stdout
    finally:
        first.terminate()
        first.wait(timeout=60)


def test_code_that_changes_during_a_run_is_refused_by_the_jobs_that_run_it(tiny_target, tmp_path):
    run = Run(tmp_path / "run", longer(tiny_target))
    run.write_data()
    driver = subprocess.Popen(
        run.command(),
        cwd=run.folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.STDOUT,
    )
    while not (run.folder / POINTS[0]).exists():
        assert driver.poll() is None
        time.sleep(0.02)
    run.edit("scripts/draftmill/eagle3.py", "EAGLE-3:", "EAGLE 3:")
    output = driver.communicate()[0]
    assert driver.returncode != 0
    assert "scripts/draftmill/eagle3.py: changed after this run was planned" in output
    assert not run.result("drafters/small/model.safetensors").exists()
    run.snakemake()
