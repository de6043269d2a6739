"""One invocation of Snakemake: the frozen plan, the lock of the run, signals, and foreign results."""

import fcntl
import hashlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from draftmill import algorithms
from draftmill.atomic import write_json
from draftmill.driver import shard_jobs
from draftmill.driver.artefacts import Artefact, artefacts
from draftmill.driver.code import raw_digests
from draftmill.driver.plan import Plan
from draftmill.driver.provenance import compare
from draftmill.errors import DraftmillError
from draftmill.job_times import LOADS_TARGET
from draftmill.stage import canonical

LISTED = 5  # stale files named in a message


@dataclass
class Session:
    root: str
    frozen: dict
    fresh: set[str]  # paths of the artefacts that are as planned
    jobs: dict  # rule -> its jobs of several shards
    lock: int | None = None


def plan_file(root: str) -> str:
    """Where the driver leaves its frozen plan for the jobs."""
    return f"{root}/.plan.json"


def open_session(workflow, plan: Plan) -> Session:
    """Freezes code and configuration as they are now.

    In the driver, refuses results that this clone did not make and that do not fit the plan. In a child
    process of a cluster executor, refuses a plan that is not the driver's.
    """
    frozen = {"code": {}, "config": hashlib.sha256(canonical(plan.config).encode()).hexdigest()}
    for script in sorted(p.name for p in Path(workflow.basedir, "scripts").glob("*.py")):
        frozen["code"][script] = raw_digests(script)
    for file in algorithms.files(Path(workflow.basedir, "scripts")):
        frozen["code"][file] = raw_digests(file)
    # the jobs' `python` is the driver's, activated environment or not
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    fresh, foreign = compare(plan)
    if workflow.is_main_process:
        refuse_foreign(plan, foreign)
        jobs = frozen["jobs"] = jobs_of_several(workflow, plan, fresh)
    else:
        check_driver(plan.root, frozen)
        jobs = shard_jobs.planned(Path(plan_file(plan.root)))
    return Session(plan.root, frozen, fresh, jobs)


def jobs_of_several(workflow, plan: Plan, fresh: set[str]) -> dict[str, list]:
    """rule -> jobs of several shards, of those that are not as planned."""
    waiting: dict[str, shard_jobs.Shards] = {rule: [] for rule in LOADS_TARGET}
    target = [f"{plan.root}/target/manifest.json", f"{plan.root}/target/head.safetensors"]
    for artefact in artefacts(plan):
        if artefact.rule not in LOADS_TARGET:
            continue
        capture, source, file = Path(artefact.path).parts[-3:]
        at = {"capture": capture, "source": source, "shard": Path(file).stem}
        settings = plan.settings(artefact.rule, **at)
        # a temporary shard was deleted after its last use: as planned while its record says so
        used = not plan.config["hidden_states"]["keep_states"] and not Path(artefact.path).exists()
        used = used and shard_jobs.recorded_with(artefact.path, settings)
        if artefact.path not in fresh and not used:
            waiting[artefact.rule].append(tuple(at.values()))
            continue
        inputs = [f"{plan.root}/tokens/{source}/{at['shard']}.parquet", target[0]]
        if artefact.rule == "gate_hidden_states":
            states = f"{plan.root}/hidden_states/{capture}/{source}/{at['shard']}.parquet"
            inputs += [states, target[1]]
        shard_jobs.settle(artefact.path, artefact.rule, settings, inputs)
    return {
        rule: shard_jobs.grouped(shards, shard_jobs.shards_per_job(workflow, rule))
        for rule, shards in waiting.items()
    }


def refuse_foreign(plan: Plan, stale: list[Artefact]) -> None:
    if stale:
        names = ", ".join(a.path for a in stale[:LISTED]) + (" ..." if stale[LISTED:] else "")
        raise DraftmillError(
            f"{plan.root}: {len(stale)} files were not made by this clone and do not fit its code, "
            f"configuration or sources: {names}; go back to what made them, or let `python "
            "scripts/prune.py --stale --delete` remove them (with the same --configfile, if any), and "
            "the next run rebuilds them."
        )


def check_driver(root: str, frozen: dict) -> None:
    path = Path(plan_file(root))
    planned = json.loads(path.read_text()) if path.is_file() else frozen
    changed = [s for s, files in planned["code"].items() if frozen["code"].get(s) != files]
    if changed or planned["config"] != frozen["config"]:
        what = f"scripts/{changed[0]} or a module of it" if changed else "the configuration"
        raise DraftmillError(
            f"{what} changed after this run was planned; nothing was computed; start Snakemake again."
        )


def begin(session: Session) -> None:
    """When jobs are about to run: takes the lock of the run, leaves the plan, passes signals on."""
    session.lock = lock_of_run(Path(session.root))
    write_json(plan_file(session.root), session.frozen)
    for number in (signal.SIGTERM, signal.SIGINT):
        pass_on(number)


def lock_of_run(root: Path) -> int:
    """Takes the lock of a run; the kernel frees it with this process.

    Raises DraftmillError where another process holds it.
    """
    root.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(root / ".lock", os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DraftmillError(
            f"{root}: another run is working here; wait for it or stop it first."
        ) from None
    return descriptor


def pass_on(number: int) -> None:
    """Ends the running jobs when the driver is told to end; Snakemake alone would wait for them."""
    before = signal.getsignal(number)

    def handler(number, frame) -> None:
        for child in psutil.Process().children(recursive=True):
            try:
                child.terminate()
            except psutil.NoSuchProcess:
                continue
        if callable(before):
            before(number, frame)

    signal.signal(number, handler)
