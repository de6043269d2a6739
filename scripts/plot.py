"""The report's figures: training curves, and acceptance per draft position."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import pyarrow.parquet as pq

from draftmill.atomic import atomic_path
from draftmill.stage import Stage, combine

matplotlib.rcParams["svg.hashsalt"] = "draftmill"  # the same figure gives the same bytes
matplotlib.rcParams["font.size"] = 10
LOSSES = {  # algorithm -> what its loss is; no two are comparable
    "eagle3": "loss, summed over TTT steps",
    "dflash": "loss, weighted mean over a block",
    "dflash2": "loss, weighted mean over a block,\nwith the selector's",
    "dspark": "loss, weighted mean over a block,\nwith the confidence head's",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--acceptance", required=True, type=Path, nargs="+")
    parser.add_argument("--metrics", type=Path, nargs="*", default=[])
    parser.add_argument("--training", required=True, type=Path)
    parser.add_argument("--per-position", required=True, type=Path)
    options = parser.parse_args()
    draw(
        options.settings,
        options.acceptance,
        options.metrics,
        options.training,
        options.per_position,
    )


def draw(
    stage: Stage, acceptance: list[Path], metrics: list[Path], training: Path, per_position: Path
) -> None:
    measured = {path: json.loads(path.read_text()) for path in acceptance}
    found = combine(value["fingerprint"] for value in measured.values())
    stage.expect("acceptance", acceptance[0].parent.parent, found)
    metadata = [pq.read_schema(path).metadata or {} for path in metrics]
    trained = combine(m.get(b"fingerprint", b"").decode() for m in metadata)
    stage.expect("drafters", "metrics.parquet of the drafters", trained)
    save(training_figure(metrics, stage.config["algorithms"]), training, stage)
    save(acceptance_figure(measured), per_position, stage)


def save(figure, path: Path, stage: Stage) -> None:
    mark = f"draftmill-fingerprint:{stage.fingerprint}"
    with atomic_path(path) as temporary:
        metadata = {"Description": mark, "Date": None}
        figure.savefig(temporary, format="svg", bbox_inches="tight", metadata=metadata)
    plt.close(figure)


def training_figure(paths: list[Path], algorithms: dict[str, str]):
    """Loss and first-draft accuracy over the steps, per drafter; a row of its own for each algorithm.

    paths: metrics.parquet in the drafters' folders. algorithms: drafter -> algorithm.
    """
    kinds = sorted(set(algorithms.values()))
    if not kinds:
        return sentence("No drafter was trained in this run.")
    size = (10, 3.6 * len(kinds))
    figure, grid = plt.subplots(len(kinds), 2, figsize=size, squeeze=False, layout="constrained")
    for kind, (losses, accuracies) in zip(kinds, grid, strict=True):
        losses.set(title=kind, xlabel="step", ylabel=LOSSES[kind], yscale="log")
        accuracies.set(xlabel="step", ylabel="accuracy of the first draft token", ylim=(0, 1))
    for color, path in enumerate(paths):
        losses, accuracies = grid[kinds.index(algorithms[path.parent.name])]
        rows = pq.read_table(path).to_pylist()
        for kind, style in (("train", {"lw": 0.8, "alpha": 0.6}), ("validation", {"marker": "o"})):
            kept = [r for r in rows if r["kind"] == kind]
            steps, label = [r["step"] for r in kept], f"{path.parent.name}, {kind}"
            losses.plot(steps, [r["loss"] for r in kept], f"C{color}", label=label, **style)
            first = [r["full_acc_0"] for r in kept]
            accuracies.plot(steps, first, f"C{color}", label=label, **style)
    for accuracies in grid[:, 1]:
        accuracies.legend(fontsize=8)
    return figure


def sentence(text: str):
    """A figure that says why there is none."""
    figure = plt.figure(figsize=(6, 0.5))
    figure.text(0.5, 0.5, text, ha="center", va="center")
    return figure


def acceptance_figure(measured: dict[Path, dict]):
    """The share of steps that accept at least k draft tokens."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for path, value in measured.items():
        shares = value["acceptance_per_position"]
        label = f"{path.parent.name} on {path.stem}: tau {value['tau_pooled']:.2f}"
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
    axes.set(xlabel="draft position", ylabel="share of steps that accept it", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
