"""The batch that training takes first is the one that the audit's other checks look at."""

import torch

from draftmill import audit_packs
from draftmill.audit_checks import require
from draftmill.audited import Audited
from draftmill.training_state import Progress


def batch(audited: Audited) -> dict:
    """The trainer's first batch of the first two epochs equals, bit for bit, the samples of its pack as prepared
    and packed here, what is drawn anew each epoch included."""
    training = audited.training
    trainer, data = training.trainer, training.data["train"]
    for epoch in range(2):
        found = next(trainer.batches(data, Progress(epoch=epoch)))
        expected = audit_packs.first_of(trainer, data, 0, epoch).batch(trainer)
        require(
            found.keys() == expected.keys(),
            f"the trainer's batch holds {', '.join(sorted(found))}, not {', '.join(sorted(expected))}; look at "
            "Trainer._load.",
        )
        for name, tensor in expected.items():
            require(
                torch.equal(found[name].cpu(), tensor),
                f"{name} of the trainer's first batch of epoch {epoch} are not those of its samples, so it trains on "
                "something else than was extracted and drawn; look at Trainer.batches and Trainer._load.",
            )
    return {name: list(tensor.shape) for name, tensor in expected.items()}
