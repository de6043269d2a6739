"""Starts a stage script inside a job: checks the code against the plan, and ends with an honest status.

    python scripts/draftmill/launch.py --plan results/RUN/.plan.json scripts/STAGE.py [arguments]

- The driver froze the raw digests of the code when it planned; a job whose files differ now refuses.
- A local module that the script loaded without the plan knowing it fails the job.
- DraftmillError ends as one sentence and status 1; SIGTERM and SIGINT clean up and end with 128 + n.
- The job dies with its parent (Linux), so that a killed driver leaves no orphan behind.
"""

import argparse
import ctypes
import itertools
import json
import runpy
import signal
import sys
from hashlib import sha256
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", type=Path, help="the digests that the driver froze")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    files = [options.script.name, *chosen_files(options.arguments)]
    planned = planned_digests(options.plan, files) if options.plan else None
    sys.dont_write_bytecode = True
    sys.path[0] = str(SCRIPTS)
    sys.argv = [str(options.script), *options.arguments]
    from draftmill.errors import DraftmillError

    before = set(sys.modules)
    try:
        runpy.run_path(str(options.script), run_name="__main__")
        if planned is not None:
            check_loaded(options.script, planned, before)
    except DraftmillError as error:
        sys.exit(f"{options.script.name}: {error}")


def die_with_parent() -> None:
    """Asks the kernel to end this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def chosen_files(arguments: list[str]) -> list[str]:
    """The files of the modules that the settings name: the script imports them by name."""
    for option, value in itertools.pairwise(arguments):
        if option == "--settings":
            modules = json.loads(value).get("modules", [])
            return [module.replace(".", "/") + ".py" for module in modules]
    return []


def planned_digests(plan: Path, files: list[str]) -> dict[str, str]:
    """The plan's raw digests of the code behind these files, after comparing them with the disk."""
    code = json.loads(plan.read_text())["code"]
    for file in files:
        if file not in code:
            sys.exit(
                f"scripts/{file}: is not in the plan of this run; nothing was computed; start Snakemake again."
            )
    digests = {name: digest for file in files for name, digest in code[file].items()}
    for name, planned in digests.items():
        if sha256((SCRIPTS / name).read_bytes()).hexdigest() != planned:
            sys.exit(
                f"scripts/{name}: changed after this run was planned; nothing was computed; "
                "start Snakemake again, so that it plans with the code as it is now."
            )
    return digests


def check_loaded(script: Path, planned: dict[str, str], before: set[str]) -> None:
    """Fails where a module under scripts/ was loaded that the script's fingerprint does not cover."""
    loaded = [module for name, module in list(sys.modules.items()) if name not in before]
    files = (getattr(module, "__file__", None) for module in loaded)
    local = {Path(f).resolve() for f in files if f and Path(f).resolve().is_relative_to(SCRIPTS)}
    unknown = {str(f.relative_to(SCRIPTS)) for f in local} - {*planned}
    if unknown:
        sys.exit(
            f"{script.name}: loaded {', '.join(sorted(unknown))}, which its fingerprint does not "
            "cover; import it by a plain import statement, so that a change in it is noticed."
        )


if __name__ == "__main__":
    main()
