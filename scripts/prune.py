"""Lists, and on request deletes, the files under results/ that no configured run needs.

    python scripts/prune.py                          lists, with bytes
    python scripts/prune.py --delete                 deletes what configured runs left behind
    python scripts/prune.py --other-runs --delete    and the runs that no given configuration names
    python scripts/prune.py --stale [--delete]       files that another clone made and that do not fit

The configurations are config.yaml and configs/*.yaml, or those of --configfile.
"""

import argparse
from pathlib import Path

import yaml

from draftmill.driver.artefacts import artefacts
from draftmill.driver.config import completed
from draftmill.driver.plan import Plan
from draftmill.driver.provenance import compare
from draftmill.driver.session import lock_of_run
from draftmill.errors import DraftmillError

RESULTS = Path("results")
KEPT = (".plan.json", ".lock")  # the driver's own


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configfile", type=Path, nargs="+")
    parser.add_argument("--other-runs", action="store_true")
    parser.add_argument("--stale", action="store_true")
    parser.add_argument("--delete", action="store_true")
    options = parser.parse_args()
    configs = options.configfile or [Path("config.yaml"), *sorted(Path("configs").glob("*.yaml"))]
    plans, unknown = plans_of(configs)
    if options.stale:
        found = [a for plan in plans for a in compare(plan)[1]]
        named = [Path(name) for a in found for name in (a.path, *a.companions)]
        report([path for path in named if path.is_file()], options.delete, "stale")
        return
    roots = {Path(plan.root) for plan in plans}
    report(orphans(plans, unknown), options.delete, "that configured runs do not need")
    others = [p for p in RESULTS.glob("*") if p.name not in unknown and p not in roots]
    files = [path for folder in sorted(others) for path in files_under(folder)]
    report(files, options.delete and options.other_runs, "of runs that no configuration names")


def report(files: list[Path], delete: bool, what: str) -> None:
    """Prints each file with its bytes and, where asked, deletes it while no run works there."""
    total, locks = 0, {}
    for path in files:
        root = RESULTS / path.relative_to(RESULTS).parts[0]
        if delete and root not in locks:
            locks[root] = lock_of_run(root)
        size = path.stat().st_size
        total += size
        print(f"{size:>15,} {path}")
        if delete:
            path.unlink()
    print(f"{total:>15,} bytes in {len(files)} files {what}{': deleted' if delete else ''}")


def plans_of(configs: list[Path]) -> tuple[list[Plan], set[str]]:
    """The plans, and the names of runs that cannot be planned here: their files are left alone."""
    plans, unknown = [], set()
    for path in configs:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        try:
            plan = Plan(completed(raw))
            list(artefacts(plan))
            plans.append(plan)
        except DraftmillError as error:
            unknown.add(raw.get("run"))
            print(f"{path}: cannot be planned here, so its run is left alone ({error})")
    return plans, unknown


def files_under(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else [folder]


def orphans(plans: list[Plan], unknown: set[str]) -> list[Path]:
    """Files in the plans' runs that none of them makes; unfinished resume states of theirs are kept."""
    wanted: set[str] = set()
    for plan in plans:
        wanted |= {f"{plan.root}/{name}" for name in KEPT}
        for artefact in artefacts(plan):
            wanted |= {artefact.path, *artefact.companions}
            wanted.add(f"{plan.root}/.resume/{artefact.rule}-{artefact.fingerprint}.safetensors")
    roots = sorted({Path(p.root) for p in plans if p.config["run"] not in unknown})
    roots = [root for root in roots if root.is_dir()]
    return [p for root in roots for p in files_under(root) if p.as_posix() not in wanted]


if __name__ == "__main__":
    main()
