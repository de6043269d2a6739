"""How much memory (the resource mem_mb) is asked for jobs that load the target: schedulers kill what takes more.

A quantised checkpoint takes more than its files when it is resident, since it is dequantised, and a streamed one
takes far less: both are set in a profile (profiles/large-target), with the figures of scripts/plan.py.
"""

import math

from draftmill.driver.target_source import weight_bytes

BASE_MB = (
    4000  # Python, libraries, activations of a small batch; all where the weights are not at hand
)
PARTS_MB = 16000  # embedding, norm and head of the largest targets: what is read of a checkpoint to describe it
MARGIN = 1.2


def resident_mb(target: dict) -> int:
    """Megabytes of a job that holds the whole target. target: the configuration's section."""
    return BASE_MB + math.ceil(MARGIN * (weight_bytes(target) or 0) / 1e6)


def generation_mb(config: dict) -> int:
    """Megabytes of a job that generates answers: another process holds the target where a server answers."""
    served = config["responses"]["backend"] != "transformers"
    return BASE_MB if served else resident_mb(config["target"])


def preparation_mb(target: dict) -> int:
    """Megabytes of prepare_target, which reads two tensors."""
    return min(resident_mb(target), PARTS_MB)
