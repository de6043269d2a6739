"""The audit of a training step, on the real model, batch and step: what must hold before a drafter is trained.

Each check names, where it fails, what it found, what it means and where to look.
"""

import argparse
from collections.abc import Callable
from types import ModuleType

from draftmill import (
    audit_batch,
    audit_checks,
    audit_drafter,
    audit_leaks,
    audit_loss,
    audit_targets,
    audited,
    drafter_training,
    tensor_files,
)
from draftmill.audit_checks import Result
from draftmill.audited import Audited
from draftmill.errors import DraftmillError

CHECKS = {
    "batch": audit_batch.batch,
    "layers": audit_targets.layers,
    "vocabulary": audit_drafter.vocabulary,
    "masks": audit_loss.masks,
    "loss": audit_loss.loss,
    "noise": audit_targets.noise,
    "states": audit_leaks.states,
    "documents": audit_leaks.documents,
    "packing": audit_leaks.packing,
    "attention": audit_leaks.attention,
    "rotary": audit_drafter.rotary,
    "step 0": audit_loss.step_0,
}
LAST = {"frozen": audit_drafter.frozen}  # it trains


def audit(
    options: argparse.Namespace, algorithm: ModuleType, companion: ModuleType
) -> tuple[list[Result], dict]:
    """The results of all checks, and the record of the job.

    options: those of a train script. companion: the audited_ module of the algorithm.
    Raises DraftmillError that names the first failed check; the others stand in the log.
    """
    subject = opened(options, algorithm, companion)
    results = checked(subject)
    failed = [result for result in results if not result.passed]
    if failed:
        others = ", ".join(result.name for result in failed[1:])
        raise DraftmillError(
            f"{failed[0].failure}" + (f" (also failed, see the log: {others})" if others else "")
        )
    training = subject.training
    return results, training.stage.record(dtypes=dict(training.ledger))


def opened(options: argparse.Namespace, algorithm: ModuleType, companion: ModuleType) -> Audited:
    """The training that these options describe, ready to be audited."""
    training = drafter_training.prepare(options, algorithm)
    file, _ = tensor_files.read(options.head)
    return audited.of(training, algorithm, companion, file)


def checks_of(companion: ModuleType) -> dict[str, Callable[[Audited], dict]]:
    """All checks of an algorithm, in their order."""
    return {**CHECKS, **companion.CHECKS, **LAST}


def checked(subject: Audited) -> list[Result]:
    """Runs every check, whatever the others find, and prints what it finds."""
    results = []
    for name, check in checks_of(subject.companion).items():
        results.append(audit_checks.run(name, check, subject))
        print(results[-1].failure or f"{name}: passed {results[-1].figures}", flush=True)
    return results
