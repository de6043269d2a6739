"""What training said of a drafter, held against the exported checkpoint and against guessing."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from draftmill.drafter_trials import zeroed
from draftmill.errors import DraftmillError, damaged
from draftmill.packing import pack
from draftmill.state_dataset import StateDataset
from draftmill.target_head import TargetHead

FIRST_DRAFT = "full_acc_0"
WORSE_THAN_GUESSING = 1.5
# the exported drafter is run on some of the answers only
KEPT_ACCURACY, DEVIATIONS = 0.85, 2


@dataclass(frozen=True)
class Figures:
    """last_train_loss, best_validation_loss: as training computed them. first_draft: the share of first drafts
    that were right in that validation; None where the algorithm does not count them."""

    last_train_loss: float
    best_validation_loss: float
    first_draft: float | None


def read(folder: Path, run: dict) -> Figures:
    """The figures in a trained drafter's metrics.parquet. Raises DraftmillError where they are not its run's."""
    path = folder / "metrics.parquet"
    try:
        rows = pq.read_table(path, page_checksum_verification=True).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, error) from None
    train = [r for r in rows if r["kind"] == "train"]
    best = [r for r in rows if r["kind"] == "validation" and r["step"] == run["best_step"]]
    if not train or not best or best[-1]["loss"] != run["best_validation_loss"]:
        raise damaged(path, f"it has no validation at step {run['best_step']} as run.json has it")
    return Figures(train[-1]["loss"], best[-1]["loss"], best[-1].get(FIRST_DRAFT))


def check_first_draft(recorded: float | None, right: int, total: int, folder: Path) -> dict:
    """The exported checkpoint's first drafts must be right about as often as training's validation had it."""
    share = right / total if total else None
    found = {"here": share, "in_training": recorded, "positions": total}
    if not total or not recorded:
        return found
    noise = DEVIATIONS * math.sqrt(recorded * (1 - recorded) / total)
    if share < KEPT_ACCURACY * recorded - noise:
        raise DraftmillError(
            f"check: training: {folder} proposes the target's next token in {share:.1%} of {total} places of the "
            f"validation answers, but training's own validation had {recorded:.1%}; so it is run otherwise than it "
            "was trained: other layers (output_of, off by one), another order of layers, or another "
            "model code; compare the layers in run.json and config.json with the capture."
        )
    return found


def check_losses(figures: Figures, guess: float, folder: Path) -> tuple[dict, list[str]]:
    """What was learnt must hold on other text: the best validation loss is not far above that of a uniform guess.

    Where the training loss is above it too, nothing was learnt yet, as after a few steps against a target that
    hardly prefers a token: a warning, the second value.
    """
    found = {
        "last_train": figures.last_train_loss,
        "best_validation": figures.best_validation_loss,
        "uniform_guess": guess,
    }
    if figures.best_validation_loss <= WORSE_THAN_GUESSING * guess:
        return found, []
    sentence = (
        f"the best validation loss of {folder} is {figures.best_validation_loss:.3f}, where equal logits for all "
        f"tokens have {guess:.3f}; the last training loss is {figures.last_train_loss:.3f}"
    )
    if math.isfinite(figures.best_validation_loss) and figures.last_train_loss > guess:
        return found, [f"{sentence}: it has hardly been trained"]
    raise DraftmillError(
        f"check: held out: {sentence}; what the drafter learnt does not hold on other text; look at metrics.parquet, "
        "the validation sources and training.learning_rate."
    )


@torch.inference_mode()
def uniform_guess(
    algorithm: ModuleType,
    drafter: nn.Module,
    run: dict,
    manifest: dict,
    tensors: dict[str, torch.Tensor],
    data: StateDataset,
) -> float:
    """The training loss on one pack of held-out conversations if all heads gave zeros: equal logits for all tokens.

    run: the drafter's run.json, whose record holds the settings it was trained with. tensors: head.safetensors.
    Leaves hooks on the drafter.
    """
    settings = json.loads(run["record"]["settings"])["config"]
    limit = settings["training"]["tokens_per_batch"]
    device = drafter.fc.weight.device
    rows = drafter.t2d.bool().cpu() if drafter.use_draft_vocab else None
    head = TargetHead(manifest, tensors, rows).to(device)
    model = algorithm.WithTargets(drafter, head, settings).eval()
    prepare, samples, used = algorithm.prepared(settings), [], 0
    for index in range(len(data)):
        used += algorithm.length(data.about(index)["tokens"])
        if samples and used > limit:
            break
        samples.append(prepare(data[index], f"check/{index}"))
    batch = {name: value.to(device) for name, value in pack(samples, limit).items()}
    with zeroed(algorithm.heads(drafter)):
        loss, _ = model(batch)
    return float(loss)
