"""tau of a drafter on one test source, exact and greedy, from the stored evaluation states."""

import argparse
import json
from pathlib import Path

from draftmill import acceptance, algorithms, drafter_evaluation
from draftmill.atomic import read_json, sha256_of, write_json
from draftmill.dtype_policy import Ledger
from draftmill.errors import DraftmillError
from draftmill.repetition import repeated_share
from draftmill.stage import Stage
from draftmill.state_dataset import StateDataset
from draftmill.target_manifest import read_manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--target", required=True, type=Path, help="the target's manifest.json")
    parser.add_argument("--drafter", required=True, type=Path, help="the drafter's folder")
    parser.add_argument("--hidden-states", required=True, type=Path, help="the source's manifest")
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    measure(
        options.settings, options.target, options.drafter, options.hidden_states, options.output
    )


def measure(stage: Stage, target: Path, folder: Path, states: Path, output: Path) -> None:
    settings = stage.config
    manifest = read_manifest(target)
    stage.expect("target", target, manifest["fingerprint"])
    run = read_json(folder / "run.json")
    stage.expect("drafter", folder / "run.json", run["fingerprint"])
    layers = settings["layers"]["output_of"]
    data = StateDataset([states], manifest["dtype"], layers)
    stage.expect("hidden_states", states, data.fingerprints[0])
    if len(data) == 0:
        raise DraftmillError(f"{states}: holds no sample, so there is nothing to measure.")
    algorithm, ledger = algorithms.load(settings["algorithm"]), Ledger()
    drafter = drafter_evaluation.opened(algorithm, folder, manifest["dtype"], ledger)
    check_files(folder, run["files"])
    check_agreement(run, data, states)
    check_target(run, stage, folder)
    algorithm.check_target(drafter, manifest, layers, folder)
    found = evaluate(algorithm, drafter, data, settings, ledger, manifest)
    if not any(walk.emitted for walk in found["walks"]):
        raise DraftmillError(
            f"{states}: no answer has a second token, so there is no step to measure; raise "
            "responses.max_new_tokens."
        )
    write_json(
        output,
        document(stage, manifest, run, found | {"drafting": algorithm.DRAFTING}, drafter, ledger),
    )


def check_files(folder: Path, files: dict[str, str]) -> None:
    for name, digest in files.items():
        if sha256_of(folder / name) != digest:
            raise DraftmillError(
                f"{folder / name}: was edited after it was made (its SHA-256 is not the one in run.json); "
                "delete it and start Snakemake again to make it anew."
            )


def check_agreement(run: dict, data: StateDataset, states: Path) -> None:
    """The states must be of the layers and the rendering that the drafter was trained on; a drafter that
    others trained does not say which rendering that was."""
    if run["rendering"] not in (None, data.rendering):
        raise DraftmillError(
            f"{states}: its prompts were rendered with {data.rendering}, but the drafter was trained "
            f"with {run['rendering']}; training and evaluation must agree."
        )
    if run["layers"]["output_of"] != data.layers:
        raise DraftmillError(
            f"{states}: holds output_of {data.layers}, but the drafter was trained on "
            f"{run['layers']['output_of']}."
        )


def check_target(run: dict, stage: Stage, folder: Path) -> None:
    """The target that the drafter was made for, as its own record has it, is the one of this run."""
    found = json.loads(run["record"]["settings"])["inputs"]["target"]
    if found != stage.inputs["target"]:
        raise DraftmillError(
            f"{folder / 'run.json'}: was made for the target with the fingerprint {found}, but this run's "
            f"has {stage.inputs['target']}; delete the drafter and start Snakemake again to make one for this "
            "target."
        )


def evaluate(algorithm, drafter, data, settings: dict, ledger: Ledger, manifest: dict) -> dict:
    """Walks every response; teacher-forced passes of the drafter give its drafts at every place."""
    dtype, draft_tokens = manifest["dtype"], settings["draft_tokens"]
    walks, abouts, texts, missing, known = [], [], [], 0, drafter.t2d
    for index in range(len(data)):
        sample, about = data[index], data.about(index)
        ledger.expect("hidden states in evaluation", sample["aux"].dtype, dtype)
        ids = sample["input_ids"].tolist()
        text = ids[about["start"] :]
        # a loop knows its limit beforehand, wherever the answer then ends
        limit = settings["max_new_tokens"]
        end = None if limit is None else about["start"] + limit
        proposals = algorithm.drafts(drafter, sample, draft_tokens, max(1, about["start"]), end)
        walks.append(acceptance.walk(ids, about["start"], proposals, draft_tokens))
        abouts.append(about)
        texts.append(text)
        if known is not None:
            missing += int((~known.bool().cpu()[sample["input_ids"][about["start"] :]]).sum())
    outside = missing / max(1, sum(map(len, texts)))
    return {"walks": walks, "abouts": abouts, "texts": texts, "outside": outside}


def document(stage: Stage, manifest: dict, run: dict, found: dict, drafter, ledger: Ledger) -> dict:
    settings, walks, abouts = stage.config, found["walks"], found["abouts"]
    n = settings["repetition_ngram"]
    categories = acceptance.by_category(walks, [a["category"] for a in abouts], settings)
    for name, group in categories.items():
        texts = [t for t, a in zip(found["texts"], abouts, strict=True) if a["category"] == name]
        group["repetition"] = repeated_share(texts, n)
    conditions = {
        "temperature": 0,
        "drafting": found["drafting"],
        "draft_tokens": settings["draft_tokens"],
        "max_new_tokens": settings["max_new_tokens"],
        "longest_response": max(map(len, found["texts"])),
        "chat_template_kwargs": settings["chat_template_kwargs"],
        "draft_vocab_size": drafter.draft_vocab_size,
        "target": manifest["name"],
        "dtype": manifest["dtype"],
    }
    return acceptance.summary(walks, settings) | {
        "repetition": repeated_share(found["texts"], n),
        "repetition_ngram": n,
        "out_of_draft_vocab": found["outside"],
        "categories": categories,
        "conditions": conditions,
        "per_response": [
            {"row": a["row"], "turn": a["turn"], "emitted": w.emitted}
            for a, w in zip(abouts, walks, strict=True)
        ],
        "drafter": {k: run[k] for k in ("algorithm", "seed", "steps", "best_step", "precision")},
        "imported": run.get("imported"),
        "record": stage.record(dtypes=dict(ledger)),
        "fingerprint": stage.fingerprint,
    }


if __name__ == "__main__":
    main()
