"""Where a job computes: the GPU that it sees, else the CPU."""

import torch


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
