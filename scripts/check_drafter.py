"""The gate after training or import: the exported checkpoint is what was made, uses what it is given, and
sees nothing of what it is to propose."""

import argparse
from pathlib import Path

import torch

from draftmill import (
    algorithms,
    draft_leaks,
    drafter_evaluation,
    drafter_trials,
    drafter_weights,
    normed_states,
    target_head,
    training_figures,
)
from draftmill.atomic import read_json, write_json
from draftmill.devices import best_device
from draftmill.dtype_policy import Ledger
from draftmill.errors import DraftmillError
from draftmill.fresh_drafts import fresh_drafts
from draftmill.stage import Stage, combine
from draftmill.state_dataset import StateDataset
from draftmill.target_manifest import read_manifest

FRESH_TEXTS = 2  # drafted in a fresh process as well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--target", required=True, type=Path, help="the target's manifest.json")
    parser.add_argument("--head", required=True, type=Path)
    parser.add_argument("--drafter", required=True, type=Path, help="the drafter's folder")
    parser.add_argument("--hidden-states", required=True, type=Path, nargs="+", help="manifests")
    parser.add_argument("--output", required=True, type=Path)
    o = parser.parse_args()
    check(o.settings, o.target, o.head, o.drafter, o.hidden_states, o.output)


def check(
    stage: Stage, target: Path, head: Path, folder: Path, states: list[Path], output: Path
) -> None:
    """states: manifests of the validation sources, or, for a drafter that was not trained here, of a test source."""
    settings, manifest = stage.config, read_manifest(target)
    stage.expect("target", target, manifest["fingerprint"])
    run = read_json(folder / "run.json")
    stage.expect("drafter", folder / "run.json", run["fingerprint"])
    layers = settings["layers"]["output_of"]
    data = StateDataset(states, manifest["dtype"], layers)
    stage.expect("hidden_states", states[0], combine(data.fingerprints))
    tensors = target_head.read(head, stage)

    algorithm, ledger = algorithms.load(settings["algorithm"]), Ledger()
    drafter = drafter_evaluation.opened(algorithm, folder, manifest["dtype"], ledger)
    drafter_weights.check_files(folder, run["files"])
    algorithm.check_target(drafter, manifest, layers, folder)
    imported = run.get("imported") is not None
    found = drafter_weights.check_values(drafter, folder)
    found["of_the_target"] = drafter_weights.check_ends(drafter, tensors, imported, folder)
    found["fc_norms"], warnings = drafter_weights.fc_norms(drafter, layers)
    texts = drafter_trials.texts_of(data)
    if not texts:
        raise DraftmillError(
            f"check: {states[0]}: there are no two conversations with answers to draft; give the source more rows, or "
            "raise responses.max_new_tokens."
        )
    samples = [text.sample for text in texts]
    found["spread_of_lengths"] = normed_states.check_before_norm(
        samples, layers, tensors, states[0]
    )
    steps = settings["draft_tokens"]
    some = samples[-FRESH_TEXTS:]
    with fresh_drafts(settings["algorithm"], folder, some, steps) as fresh:
        own = [drafter_trials.drafts(algorithm, drafter, text, steps) for text in texts]
        found["leaks"] = draft_leaks.check_leaks(algorithm, drafter, texts, steps)
        told = None if imported else training_figures.read(folder, run)
        whole = target_head.TargetHead(manifest, tensors).to(best_device())
        first = drafter_trials.first_right(texts, own, whole, drafter.t2d)
        recorded = told and told.first_draft
        found["first_draft"] = training_figures.check_first_draft(recorded, *first, folder)
        found["trials"], undecided = drafter_trials.trials(algorithm, drafter, texts, own, steps)
        check_fresh([algorithm.drafts(drafter, sample, steps) for sample in some], fresh(), folder)
    found["losses"] = None
    if told:
        rest = (run, manifest, tensors, data)
        guess = training_figures.uniform_guess(algorithm, drafter, *rest)
        found["losses"], more = training_figures.check_losses(told, guess, folder)
        warnings += more
    found |= {"warnings": warnings + undecided, "fresh_process": {"answers": len(some)}}
    record = stage.record(dtypes=dict(ledger))
    write_json(output, found | {"record": record, "fingerprint": stage.fingerprint})


def check_fresh(own: list[torch.Tensor], fresh: list[torch.Tensor], folder: Path) -> None:
    """The same files must give the same drafts in a process of their own."""
    for here, there in zip(own, fresh, strict=True):
        if not torch.equal(here, there):
            differing = int((here != there).any(-1).sum())
            raise DraftmillError(
                f"check: fresh process: {folder} gives other drafts there at {differing} of {len(here)} places than here; "
                "something that computes them is not in its files, or is not deterministic; a server's drafts would "
                "differ too."
            )


if __name__ == "__main__":
    main()
