"""Trains an EAGLE-3 drafter and exports it in speculators' format."""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from draftmill import draft_vocab, eagle3, target_head
from draftmill.atomic import atomic_path, sha256_of, write_json, write_text
from draftmill.devices import best_device
from draftmill.dtype_policy import DTYPES, Ledger, cast
from draftmill.errors import DraftmillError
from draftmill.layers import check_layers
from draftmill.stage import Stage, combine
from draftmill.state_dataset import StateDataset
from draftmill.target_manifest import read_manifest
from draftmill.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--target", required=True, type=Path, help="the target's manifest.json")
    parser.add_argument("--head", required=True, type=Path)
    parser.add_argument("--draft-vocab", required=True, type=Path)
    parser.add_argument("--train", required=True, type=Path, nargs="+", help="manifests")
    parser.add_argument("--validation", required=True, type=Path, nargs="+", help="manifests")
    parser.add_argument("--resume", required=True, type=Path, help="folder of resume states")
    parser.add_argument("--output", required=True, type=Path, help="folder of the drafter")
    options = parser.parse_args()
    train(options)


def train(options: argparse.Namespace) -> None:
    stage: Stage = options.settings
    manifest = read_manifest(options.target)
    stage.expect("target", options.target, manifest["fingerprint"])
    dtype, settings = manifest["dtype"], stage.config["training"]
    check_layers(stage.config["layers"]["output_of"], manifest["layers"], "drafter")
    weights = weights_dtype(settings["precision"], dtype)
    data = {}
    for role in ("train", "validation"):
        data[role] = StateDataset(getattr(options, role), dtype)
        stage.expect(role, getattr(options, role)[0], combine(data[role].fingerprints))
        if len(data[role]) == 0:
            raise DraftmillError(f"training: the {role} sources hold no sample.")
    t2d, d2t, record = draft_vocab.read(options.draft_vocab)
    stage.expect("draft_vocab", options.draft_vocab, record["fingerprint"])

    torch.manual_seed(settings["seed"])
    ledger = Ledger()
    device = best_device()
    tensors = target_head.read(options.head, stage)
    config = eagle3.config_of(stage.config, manifest, device)
    drafter = eagle3.new_drafter(config, tensors, t2d, d2t, DTYPES[weights])
    ledger.expect_module("drafter weights in training", drafter, weights)
    ledger.watch_inputs("states and targets entering the drafter", drafter, dtype)
    ledger.watch_compute("drafter compute", drafter.fc, dtype)
    rows = t2d if drafter.use_draft_vocab else None
    head = target_head.TargetHead(manifest, tensors, rows).to(device)
    ledger.expect("target head weights", head.dtype, dtype)
    model = eagle3.WithTargets(drafter, head, stage.config)
    prepare = partial(eagle3.shifted, ttt_steps=stage.config["ttt_steps"])
    trainer = Trainer(model, settings, prepare, dtype, ledger)
    resume = options.resume / f"{stage.rule}-{stage.fingerprint}.safetensors"
    progress = trainer.run(data["train"], data["validation"], resume)

    export(drafter, config, dtype, options.output, ledger)
    write_metrics(options.output / "metrics.parquet", progress.metrics, stage.fingerprint)
    files = {n: sha256_of(options.output / n) for n in ("config.json", "model.safetensors")}
    about = {"best_step": progress.best_step, "best_validation_loss": progress.best_loss}
    about |= {
        "cut_samples": progress.cut_samples,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seed": settings["seed"],
    }
    run = about | {"algorithm": "eagle3", "precision": settings["precision"], "files": files}
    run |= {"layers": stage.config["layers"], "rendering": data["train"].rendering}
    run |= {"record": stage.record(dtypes=dict(ledger))}
    write_json(options.output / "run.json", run | {"fingerprint": stage.fingerprint})
    resume.unlink(missing_ok=True)


def weights_dtype(precision: str, dtype: str) -> str:
    """The dtype of the weights that are trained."""
    if precision == "bf16" and dtype != "bfloat16":
        raise DraftmillError(
            f"config: training.precision is bf16, but the target's declared dtype is {dtype}; use "
            "mixed."
        )
    return "float32" if precision == "mixed" else "bfloat16"


def export(drafter, config, dtype: str, folder: Path, ledger: Ledger) -> None:
    """config.json and model.safetensors in speculators' layout, every weight in the declared dtype."""
    cast(drafter, DTYPES[dtype])
    ledger.expect_module("exported checkpoint", drafter, dtype)
    tensors = {k: v.detach().cpu().contiguous() for k, v in drafter.state_dict().items()}
    config.dtype = DTYPES[dtype]
    with tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        written = json.loads((Path(scratch) / "config.json").read_text())
    write_text(folder / "config.json", json.dumps(written, indent=2, sort_keys=True) + "\n")
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file(tensors, temporary, {"format": "pt"})  # one entry: their order is random


def write_metrics(path: Path, metrics: list[dict], fingerprint: str) -> None:
    names = sorted({name for row in metrics for name in row})
    table = pa.table({name: [row.get(name) for row in metrics] for name in names})
    table = table.replace_schema_metadata({"fingerprint": fingerprint, "complete": "1"})
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, write_page_checksum=True)


if __name__ == "__main__":
    main()
