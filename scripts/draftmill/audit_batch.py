"""The batch that training takes first is the one that the audit's other checks look at."""

import torch

from draftmill.audit_checks import require
from draftmill.audited import Audited
from draftmill.training_state import Progress


def batch(audited: Audited) -> dict:
    """The trainer's first batch equals, bit for bit, the samples of its pack as prepared and packed here."""
    training = audited.training
    found = next(training.trainer.batches(training.data["train"], Progress()))
    expected = audited.first[0].batch(training.trainer)
    require(
        found.keys() == expected.keys(),
        f"the trainer's batch holds {', '.join(sorted(found))}, not {', '.join(sorted(expected))}; look at "
        "Trainer._load.",
    )
    for name, tensor in expected.items():
        require(
            torch.equal(found[name].cpu(), tensor),
            f"{name} of the trainer's first batch are not those of its samples, so it trains on something else "
            "than was extracted; look at Trainer.batches and Trainer._load.",
        )
    return {name: list(tensor.shape) for name, tensor in expected.items()}
