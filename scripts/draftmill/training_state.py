"""The resume state of a training: one safetensors file outside the outputs, named by the fingerprint.

It holds everything that the next step depends on, in full precision: weights, AdamW's moments, the random
state, the place in the data, the metrics so far and the best weights. It can never outlive a
change of code or settings, since another fingerprint looks for another file.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from draftmill import tensor_files
from draftmill.errors import DraftmillError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class Progress:
    """Where a training stands."""

    step: int = 0
    epoch: int = 0
    pack: int = 0  # packs of this epoch already used
    tokens: int = 0
    cut_samples: int = 0
    best_step: int = 0
    best_loss: float = float("inf")
    metrics: list[dict] = field(default_factory=list)


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def save(path: Path, progress: Progress, model, optimizer, best: dict[str, torch.Tensor]) -> None:
    tensors = {"rng": torch.get_rng_state()}
    for name, parameter in trainable(model).items():
        tensors[f"weight/{name}"] = parameter.detach()
        for moment in MOMENTS:
            tensors[f"{moment}/{name}"] = optimizer.state[parameter][moment]
    tensors |= {f"best/{name}": tensor for name, tensor in best.items()}
    tensor_files.write(path, tensors, asdict(progress))


def restore(path: Path, model, optimizer) -> tuple[Progress, dict[str, torch.Tensor]]:
    """The saved progress and best weights, with model and optimizer set back to them; a fresh start
    where there is no whole file."""
    if not path.is_file():
        return Progress(), {}
    try:
        tensors, saved = tensor_files.read(path)
    except DraftmillError:
        print(f"{path}: damaged resume state; training starts anew", flush=True)
        path.unlink()
        return Progress(), {}
    progress = Progress(**saved)
    torch.set_rng_state(tensors["rng"])
    with torch.no_grad():
        for name, parameter in trainable(model).items():
            parameter.copy_(tensors[f"weight/{name}"])
            optimizer.state[parameter] = {
                m: tensors[f"{m}/{name}"].to("cpu" if m == "step" else parameter.device)
                for m in MOMENTS
            }
    print(f"resumed at step {progress.step} from {path}", flush=True)
    return progress, {k.removeprefix("best/"): v for k, v in tensors.items() if k[:5] == "best/"}
