"""The drafts of an exported drafter, made in a process of their own, where nothing but its files can help."""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftmill import algorithms
from draftmill.devices import best_device
from draftmill.errors import DraftmillError

SCRIPTS = Path(__file__).resolve().parents[1]
Sample = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", required=True)
    parser.add_argument("--drafter", required=True, type=Path, help="the drafter's folder")
    parser.add_argument("--draft-tokens", required=True, type=int)
    parser.add_argument("--threads", required=True, type=int, help="sums depend on their number")
    parser.add_argument("--samples", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tensors = load_file(options.samples)
    samples = [
        {"input_ids": tensors[f"input_ids.{i}"], "aux": tensors[f"aux.{i}"]}
        for i in range(len(tensors) // 2)
    ]
    algorithm = algorithms.load(options.algorithm)
    drafter = algorithm.load(options.drafter, best_device())
    found = [algorithm.drafts(drafter, s, options.draft_tokens) for s in samples]
    save_file({str(i): drafts for i, drafts in enumerate(found)}, options.output)


@contextmanager
def fresh_drafts(
    algorithm: str, folder: Path, samples: list[Sample], steps: int
) -> Iterator[Callable[[], list[torch.Tensor]]]:
    """Starts a process that loads the drafter in `folder`; yields what waits for its drafts of each sample.

    samples: input_ids [tokens], aux [tokens, layers * hidden]. Raises DraftmillError where it fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        given, output = Path(scratch) / "samples.safetensors", Path(scratch) / "drafts.safetensors"
        named = {f"{k}.{i}": s[k] for i, s in enumerate(samples) for k in ("input_ids", "aux")}
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, given)
        options = {"algorithm": algorithm, "drafter": folder, "draft-tokens": steps}
        options |= {"threads": torch.get_num_threads(), "samples": given, "output": output}
        command = [sys.executable, "-B", "-m", "draftmill.fresh_drafts"]
        command += [str(word) for key, value in options.items() for word in (f"--{key}", value)]
        environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
        errors = Path(scratch) / "errors.txt"
        with open(errors, "w") as told:
            child = subprocess.Popen(command, env=environment, stderr=told)

        def wait() -> list[torch.Tensor]:
            if child.wait():
                lines = errors.read_text(errors="replace").strip().splitlines()
                reason = lines[-1] if lines else f"status {child.returncode}"
                raise DraftmillError(
                    f"check: fresh process: {folder} cannot be loaded and run outside this process ({reason}); a "
                    "server could not load it either."
                )
            drafts = load_file(output)
            return [drafts[str(i)] for i in range(len(samples))]

        try:
            yield wait
        finally:
            child.kill()
            child.wait()


if __name__ == "__main__":
    main()
