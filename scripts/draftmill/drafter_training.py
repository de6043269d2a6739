"""The training of a drafter, whatever its algorithm: what the train scripts share, and what the audit runs."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from speculators import SpeculatorModelConfig
from torch import nn

from draftmill import draft_vocab, drafter_files, target_head
from draftmill.atomic import atomic_path, write_json
from draftmill.devices import best_device
from draftmill.dtype_policy import DTYPES, Ledger
from draftmill.errors import DraftmillError
from draftmill.layers import check_layers
from draftmill.stage import Stage, combine
from draftmill.state_dataset import StateDataset
from draftmill.target_manifest import read_manifest
from draftmill.trainer import Trainer


@dataclass
class Training:
    """A training that is ready to run: the model with its targets, the data and the trainer."""

    stage: Stage
    manifest: dict
    ledger: Ledger
    data: dict[str, StateDataset]  # role -> samples
    config: SpeculatorModelConfig
    drafter: nn.Module
    model: nn.Module  # the algorithm's WithTargets
    trainer: Trainer
    tensors: dict[str, torch.Tensor]  # head.safetensors
    t2d: torch.Tensor
    d2t: torch.Tensor


def parse(description: str, trains: bool = True) -> argparse.Namespace:
    """The arguments of a train script, or of one that only looks at the training."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--target", required=True, type=Path, help="the target's manifest.json")
    parser.add_argument("--head", required=True, type=Path)
    parser.add_argument("--draft-vocab", required=True, type=Path)
    parser.add_argument("--train", required=True, type=Path, nargs="+", help="manifests")
    parser.add_argument("--validation", required=True, type=Path, nargs="+", help="manifests")
    if trains:
        parser.add_argument("--resume", required=True, type=Path, help="folder of resume states")
    written = "folder of the drafter" if trains else "JSON file"
    parser.add_argument("--output", required=True, type=Path, help=written)
    return parser.parse_args()


def prepare(options: argparse.Namespace, algorithm: ModuleType) -> Training:
    """Everything up to the first step.

    Raises DraftmillError where inputs are not those that were planned, or are not as declared.
    """
    stage: Stage = options.settings
    manifest = read_manifest(options.target)
    stage.expect("target", options.target, manifest["fingerprint"])
    dtype, training = manifest["dtype"], stage.config["training"]
    layers = stage.config["layers"]["output_of"]
    check_layers(layers, manifest["layers"], "drafter")
    weights = weights_dtype(training["precision"], dtype)
    data = {}
    for role in ("train", "validation"):
        data[role] = StateDataset(getattr(options, role), dtype, layers)
        stage.expect(role, getattr(options, role)[0], combine(data[role].fingerprints))
        if len(data[role]) == 0:
            raise DraftmillError(f"training: the {role} sources hold no sample.")
    t2d, d2t, record = draft_vocab.read(options.draft_vocab)
    stage.expect("draft_vocab", options.draft_vocab, record["fingerprint"])

    torch.manual_seed(training["seed"])
    ledger = Ledger()
    device = best_device()
    tensors = target_head.read(options.head, stage)
    config = algorithm.config_of(stage.config, manifest, device, len(d2t))
    drafter = algorithm.new_drafter(config, tensors, t2d, d2t, DTYPES[weights])
    algorithm.initialise(drafter, stage.config, manifest, tensors, data["train"][0]["aux"])
    ledger.expect_module("drafter weights in training", drafter, weights)
    ledger.watch_inputs("states entering the drafter", algorithm.entry(drafter), dtype)
    ledger.watch_compute("drafter compute", drafter.fc, dtype)
    rows = t2d if drafter.use_draft_vocab else None
    head = target_head.TargetHead(manifest, tensors, rows).to(device)
    ledger.expect("target head weights", head.dtype, dtype)
    model = algorithm.WithTargets(drafter, head, stage.config)
    prepared = algorithm.prepared(stage.config)
    trainer = Trainer(model, training, prepared, algorithm.length, dtype, ledger)
    made = (stage, manifest, ledger, data, config, drafter, model, trainer)
    return Training(*made, tensors, t2d, d2t)


def train(options: argparse.Namespace, algorithm: ModuleType) -> None:
    """Trains and exports in speculators' format: config.json, model.safetensors, metrics, run.json."""
    found = prepare(options, algorithm)
    stage, folder = found.stage, options.output
    resume = options.resume / f"{stage.rule}-{stage.fingerprint}.safetensors"
    progress = found.trainer.run(found.data["train"], found.data["validation"], resume)

    drafter_files.export(found.drafter, found.config, found.manifest["dtype"], folder, found.ledger)
    write_metrics(folder / "metrics.parquet", progress.metrics, stage.fingerprint)
    training = stage.config["training"]
    run = {
        "algorithm": stage.config["algorithm"],
        "best_step": progress.best_step,
        "best_validation_loss": progress.best_loss,
        "cut_samples": progress.cut_samples,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seed": training["seed"],
        "precision": training["precision"],
        "files": drafter_files.digests(folder),
        "layers": stage.config["layers"],
        "rendering": found.data["train"].rendering,
        "record": stage.record(dtypes=dict(found.ledger)),
        "fingerprint": stage.fingerprint,
    }
    write_json(folder / "run.json", run)
    resume.unlink(missing_ok=True)


def weights_dtype(precision: str, dtype: str) -> str:
    """The dtype of the weights that are trained."""
    if precision == "bf16" and dtype != "bfloat16":
        raise DraftmillError(
            f"config: training.precision is bf16, but the target's declared dtype is {dtype}; use "
            "mixed."
        )
    return "float32" if precision == "mixed" else "bfloat16"


def write_metrics(path: Path, metrics: list[dict], fingerprint: str) -> None:
    names = sorted({name for row in metrics for name in row})
    table = pa.table({name: [row.get(name) for row in metrics] for name in names})
    table = table.replace_schema_metadata({"fingerprint": fingerprint, "complete": "1"})
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, write_page_checksum=True)
