"""The audit of a drafter's training step, before it is trained: no fault that costs tau passes unnoticed."""

import argparse
from dataclasses import asdict
from pathlib import Path

from draftmill import algorithms, audit, drafter_training
from draftmill.atomic import write_json


def main() -> None:
    run(drafter_training.parse(__doc__, trains=False))


def run(options: argparse.Namespace) -> Path:
    """Writes the figures of all checks to options.output; raises DraftmillError where one fails."""
    stage = options.settings
    chosen = stage.config["algorithm"]
    algorithm, companion = algorithms.load(chosen), algorithms.load(chosen, "audited_")
    results, record = audit.audit(options, algorithm, companion)
    checks = [asdict(result) | {"passed": result.passed} for result in results]
    for check in checks:
        del check["failure"]
    found = {"algorithm": chosen, "checks": checks, "record": record}
    write_json(options.output, found | {"fingerprint": stage.fingerprint})
    return options.output


if __name__ == "__main__":
    main()
