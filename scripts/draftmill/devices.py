"""Where a job computes: the GPU that it sees, else the CPU; and when that is full or broken."""

import torch


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# plain RuntimeErrors of torch that say nothing of the model
MACHINE = (
    "not enough memory",
    "out of memory",
    "can't allocate memory",
    "CUDA error",
    "cuda driver",
)


def is_the_machines(error: BaseException) -> bool:
    """Whether an error comes from memory or a device, not from the model's code."""
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or any(
        words.lower() in str(error).lower() for words in MACHINE
    )
