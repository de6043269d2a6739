"""An exported drafter as it is evaluated: on this job's device, with every dtype watched."""

from pathlib import Path
from types import ModuleType

from torch import nn

from draftmill.devices import best_device
from draftmill.dtype_policy import Ledger


def opened(algorithm: ModuleType, folder: Path, dtype: str, ledger: Ledger) -> nn.Module:
    """The drafter in `folder`. Its weights, what enters it, what it computes in and its logits must be `dtype`.

    Raises DraftmillError, here or in a later pass, that names the component in another one.
    """
    device = best_device()
    drafter = algorithm.load(folder, device)
    ledger.expect_module("drafter weights in evaluation", drafter, dtype)
    entry = algorithm.entry(drafter)
    ledger.watch_inputs("states entering the drafter in evaluation", entry, dtype)
    ledger.watch_compute("drafter compute in evaluation", drafter.fc, dtype)
    ledger.watch_output("drafter logits in evaluation", drafter.lm_head, dtype)
    return drafter
