"""Lists, and on request deletes, the files under results/ that no configured run needs.

python scripts/prune.py                  lists files outside the DAG of every configuration
python scripts/prune.py --delete         deletes them
python scripts/prune.py --stale          lists files of the runs whose fingerprint is not the planned one
python scripts/prune.py --stale --delete deletes those, so that the next run rebuilds them
"""

import argparse
from pathlib import Path

import yaml

from draftmill.driver import provenance
from draftmill.driver.artefacts import artefacts
from draftmill.driver.config import completed
from draftmill.driver.plan import Plan
from draftmill.errors import DraftmillError

RESULTS = Path("results")
KEPT = (".plan.json", ".lock")  # the driver's own


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--configfile", type=Path, nargs="+", help="default: config.yaml and configs/*.yaml"
    )
    parser.add_argument("--stale", action="store_true")
    parser.add_argument("--delete", action="store_true")
    options = parser.parse_args()
    configs = options.configfile or [Path("config.yaml"), *sorted(Path("configs").glob("*.yaml"))]
    plans, unknown = plans_of(configs)
    files = stale_files(plans) if options.stale else orphans(plans, unknown)
    total = 0
    for path in files:
        size = path.stat().st_size
        total += size
        print(f"{size:>15,} {path}")
        if options.delete:
            path.unlink()
    print(f"{total:>15,} bytes in {len(files)} files {'deleted' if options.delete else 'found'}")


def plans_of(configs: list[Path]) -> tuple[list[Plan], set[str]]:
    """The plans, and the names of runs that cannot be planned here: their files are left alone."""
    plans, unknown = [], set()
    for path in configs:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        try:
            plan = Plan(completed(raw))
            list(artefacts(plan))
            plans.append(plan)
        except DraftmillError as error:
            unknown.add(raw.get("run"))
            print(f"{path}: cannot be planned here, so its run is left alone ({error})")
    return plans, unknown


def orphans(plans: list[Plan], unknown: set[str]) -> list[Path]:
    """Files under results/ that no plan makes; unfinished resume states of planned jobs are kept."""
    wanted, resumable = set(), set()
    for plan in plans:
        for artefact in artefacts(plan):
            wanted |= {artefact.path, *artefact.companions}
            resumable.add(f"{plan.root}/.resume/{artefact.rule}-{artefact.fingerprint}.safetensors")
    return [
        path
        for path in sorted(p for p in RESULTS.rglob("*") if p.is_file())
        if path.relative_to(RESULTS).parts[0] not in unknown
        and path.as_posix() not in wanted | resumable
        and not (len(path.relative_to(RESULTS).parts) == 2 and path.name in KEPT)
    ]


def stale_files(plans: list[Plan]) -> list[Path]:
    stale = [a for plan in plans for a in provenance.stale(plan, only_foreign=False)]
    files = [Path(name) for a in stale for name in (a.path, *a.companions)]
    return [path for path in files if path.is_file()]


if __name__ == "__main__":
    main()
