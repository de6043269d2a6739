"""The launcher: the planned code or none, one sentence for what can be mended, an honest status."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from draftmill.driver import code

HEADER = "from draftmill.errors import DraftmillError\n"
WRITER = (
    "import sys, time\nfrom pathlib import Path\nfrom draftmill.atomic import atomic_path\n"
    "with atomic_path(sys.argv[1]) as temporary:\n"
    "    temporary.write_text('half')\n    Path(sys.argv[2]).write_text(temporary.name)\n"
    "    time.sleep(60)\n"
)
PATIENCE = 30  # seconds until a test gives up waiting; nothing is timed


class Workshop:
    """A copy of scripts/ with a plan, in which probe.py is run as a job."""

    def __init__(self, scripts: Path, monkeypatch):
        self.scripts, self.monkeypatch = scripts, monkeypatch
        self.plan_file = scripts.parent / "plan.json"

    def probe(self, text: str) -> None:
        (self.scripts / "probe.py").write_text(text, encoding="utf-8")

    def plan(self, *modules: str) -> None:
        """What the driver freezes before the jobs run; modules: files of those that are taken by name."""
        self.monkeypatch.setattr(code, "SCRIPTS", self.scripts)
        code.closure.cache_clear()
        digests = {file: code.raw_digests(file) for file in ("probe.py", *modules)}
        self.plan_file.write_text(json.dumps({"code": digests}))
        self.monkeypatch.undo()
        code.closure.cache_clear()

    def command(self, *arguments: object) -> list[str]:
        launcher, probe = self.scripts / "draftmill" / "launch.py", self.scripts / "probe.py"
        plan = ["--plan", self.plan_file] if self.plan_file.exists() else []
        return [str(a) for a in (sys.executable, launcher, *plan, probe, *arguments)]

    def run(self, *arguments: object) -> subprocess.CompletedProcess:
        command = self.command(*arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture
def workshop(tmp_path, repository, monkeypatch) -> Workshop:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(repository / "scripts", tmp_path / "scripts", ignore=ignored)
    return Workshop(tmp_path / "scripts", monkeypatch)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_job_runs_as_planned_with_its_arguments(workshop):
    workshop.probe(HEADER + "import sys\nprint(sys.argv[1:], __name__)\n")
    workshop.plan()
    found = workshop.run("--a", "b c", "--plan")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == "['--a', 'b c', '--plan'] __main__\n"


@pytest.mark.parametrize("name", ["probe.py", "draftmill/errors.py", "draftmill/atomic.py"])
def test_code_that_changed_after_planning_is_refused_by_name(name, workshop):
    workshop.probe(HEADER + "import draftmill.atomic\nprint('ran')\n")
    workshop.plan()
    with open(workshop.scripts / name, "a") as file:
        file.write("# changed\n")
    found = workshop.run()
    assert found.returncode == 1
    assert found.stdout == ""
    assert f"scripts/{name}: changed after this run was planned" in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_a_change_in_code_that_the_job_does_not_run_is_no_reason_to_refuse(workshop):
    workshop.probe(HEADER)
    workshop.plan()
    with open(workshop.scripts / "draftmill" / "eagle3.py", "a") as file:
        file.write("# changed\n")
    assert workshop.run().returncode == 0


def test_what_a_user_can_mend_is_one_sentence_without_a_traceback(workshop):
    workshop.probe(HEADER + "raise DraftmillError('rows.jsonl: is empty; add a row.')\n")
    found = workshop.run()
    assert found.returncode == 1
    assert found.stderr == "probe.py: rows.jsonl: is empty; add a row.\n"


def test_a_cause_behind_the_sentence_is_not_printed(workshop):
    text = (
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise DraftmillError('x.') from e\n"
    )
    workshop.probe(HEADER + text)
    assert workshop.run().stderr == "probe.py: x.\n"


def test_any_other_error_keeps_its_traceback(workshop):
    workshop.probe(HEADER + "raise ValueError('a bug')\n")
    found = workshop.run()
    assert found.returncode == 1
    assert "Traceback" in found.stderr
    assert "ValueError: a bug" in found.stderr


def test_a_status_that_the_script_chose_is_kept(workshop):
    workshop.probe(HEADER + "raise SystemExit(7)\n")
    workshop.plan()
    assert workshop.run().returncode == 7


@pytest.mark.parametrize("how", ["import_module", "__import__"])
def test_a_local_module_that_the_plan_does_not_know_fails_the_job(how, workshop):
    (workshop.scripts / "hidden.py").write_text("value = 1\n")
    call = {"import_module": "import importlib\nimportlib.import_module('hid' + 'den')\n"}
    workshop.probe(HEADER + call.get(how, "__import__('hid' + 'den')\n"))
    workshop.plan()
    found = workshop.run()
    assert found.returncode == 1
    assert "probe.py: loaded hidden.py" in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_a_plainly_imported_local_module_is_planned(workshop):
    (workshop.scripts / "hidden.py").write_text("value = 1\n")
    workshop.probe(HEADER + "def f():\n    import hidden\n    return hidden.value\nprint(f())\n")
    workshop.plan()
    assert workshop.run().stdout == "1\n"


BY_NAME = (
    "from draftmill import algorithms\nprint(algorithms.load('dflash', 'foreign_').__name__)\n"
)
TAKEN = "draftmill/foreign_dflash.py"
SETTINGS = ("--settings", json.dumps({"modules": ["draftmill.foreign_dflash"]}))


def test_a_module_that_the_settings_name_is_planned(workshop):
    workshop.probe(BY_NAME)
    workshop.plan(TAKEN)
    found = workshop.run(*SETTINGS)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == "draftmill.foreign_dflash\n"


@pytest.mark.parametrize("name", [TAKEN, "draftmill/foreign_speculators.py"])
def test_a_module_taken_by_name_that_changed_after_planning_is_refused(workshop, name):
    workshop.probe(BY_NAME)
    workshop.plan(TAKEN)
    with open(workshop.scripts / name, "a") as file:
        file.write("# changed\n")
    found = workshop.run(*SETTINGS)
    assert (found.returncode, found.stdout) == (1, "")
    assert f"scripts/{name}: changed after this run was planned" in found.stderr


def test_a_module_taken_by_name_that_the_settings_do_not_name_fails_the_job(workshop):
    workshop.probe(BY_NAME)
    workshop.plan(TAKEN, "draftmill/foreign_eagle3.py")
    other = json.dumps({"modules": ["draftmill.foreign_eagle3"]})
    for settings in ("{}", other):
        found = workshop.run("--settings", settings)
        assert found.returncode == 1
        assert "probe.py: loaded" in found.stderr
        assert TAKEN in found.stderr


def test_a_module_that_the_driver_did_not_plan_is_refused_by_name(workshop):
    workshop.probe(BY_NAME)
    workshop.plan()
    found = workshop.run(*SETTINGS)
    assert (found.returncode, found.stdout) == (1, "")
    assert f"scripts/{TAKEN}: is not in the plan" in found.stderr


def test_a_job_needs_nothing_of_the_project_to_run(workshop):
    workshop.probe("print('ran')\n")
    workshop.plan()
    found = workshop.run()
    assert (found.returncode, found.stdout, found.stderr) == (0, "ran\n", "")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_job_with_its_number_and_no_temporary_file(
    number, status, workshop, tmp_path
):
    workshop.probe(WRITER)
    workshop.plan()
    folder, mark = tmp_path / "out", tmp_path / "mark"
    job = subprocess.Popen(workshop.command(folder / "result", mark), stderr=subprocess.PIPE)
    wait_until(lambda: mark.exists() and mark.read_text())
    assert [path.name for path in folder.iterdir()] == [mark.read_text()]
    job.send_signal(number)
    errors = job.communicate(timeout=PATIENCE)[1]
    assert job.returncode == status
    assert b"Traceback" not in errors
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_job_does_not_outlive_its_driver(workshop, tmp_path):
    workshop.probe(WRITER)
    folder, mark = tmp_path / "out", tmp_path / "mark"
    program = "import subprocess, sys\nsubprocess.run(sys.argv[1:])\n"
    command = workshop.command(folder / "result", mark)
    driver = subprocess.Popen([sys.executable, "-c", program, *command])
    wait_until(lambda: mark.exists() and mark.read_text())
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not list(folder.iterdir()))
    assert list(folder.iterdir()) == [], "the job ended without cleaning up, or did not end"


def test_a_job_leaves_no_compiled_code_beside_the_scripts(workshop):
    workshop.probe(HEADER + "import draftmill.atomic\n")
    assert workshop.run().returncode == 0
    assert list(workshop.scripts.rglob("probe*.pyc")) == []
    assert list(workshop.scripts.rglob("atomic*.pyc")) == []
