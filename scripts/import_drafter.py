"""Takes over a drafter that others trained, so that it is measured by the same rule as those trained here."""

import argparse
from collections import Counter
from pathlib import Path

import torch
from speculators import SpeculatorModelConfig
from torch import nn

from draftmill import algorithms, drafter_files, foreign_files, target_head
from draftmill.atomic import write_json
from draftmill.dtype_policy import Ledger, name_of
from draftmill.errors import DraftmillError
from draftmill.foreign_drafter import Foreign
from draftmill.stage import Stage
from draftmill.target_manifest import read_manifest

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
NOT_TRAINED = ("best_step", "best_validation_loss", "cut_samples", "steps", "tokens", "seed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--target", required=True, type=Path, help="the target's manifest.json")
    parser.add_argument("--head", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path, help="folder of the drafter")
    options = parser.parse_args()
    import_checkpoint(options.settings, options.target, options.head, options.output)


def import_checkpoint(stage: Stage, target: Path, head: Path, output: Path) -> None:
    settings, manifest = stage.config, read_manifest(target)
    stage.expect("target", target, manifest["fingerprint"])
    tensors, dtype = target_head.read(head, stage), manifest["dtype"]
    algorithm = algorithms.load(settings["algorithm"], "foreign_")
    folder = foreign_files.folder_of(settings)
    found: Foreign = algorithm.read(folder, manifest, settings["layers"]["output_of"])
    remarks = found.remarks + about_ends(found.tensors, tensors)
    ledger = Ledger()
    drafter = filled(algorithm.skeleton(found.config), found.tensors, tensors, folder)
    drafter_files.export(drafter, found.config, dtype, output, ledger)
    check_written(found.config, output)

    dtypes = Counter(name_of(t.dtype) for n, t in found.tensors.items() if t.is_floating_point())
    run = dict.fromkeys(NOT_TRAINED) | {
        "algorithm": settings["algorithm"],
        "precision": None,
        "files": drafter_files.digests(output),
        "layers": {"output_of": found.layers},
        "rendering": None,  # nothing in a checkpoint tells it
        "imported": {
            **{key: settings[key] for key in ("path", "hub", "revision")},
            "format": found.format,
            "files": foreign_files.digests(folder),
            "dtypes": dict(sorted(dtypes.items())),
            "remarks": remarks,
        },
        "record": stage.record(dtypes=dict(ledger)),
        "fingerprint": stage.fingerprint,
    }
    write_json(output / "run.json", run)


def about_ends(tensors: dict[str, torch.Tensor], head: dict[str, torch.Tensor]) -> list[str]:
    """Whose embedding and head the drafter has."""
    if EMBEDDING not in tensors:
        remarks = ["embedding: the target's"]
    else:
        own, target = tensors[EMBEDDING], head[EMBEDDING]
        equal = own.shape == target.shape and torch.equal(own.to(target.dtype), target)
        remarks = [f"embedding: its own, {'equal to' if equal else 'other than'} the target's"]
    return [*remarks, f"head: {'its own' if HEAD in tensors else 'rows of the target'}"]


def filled(
    drafter: nn.Module,
    tensors: dict[str, torch.Tensor],
    head: dict[str, torch.Tensor],
    folder: Path,
) -> nn.Module:
    """The drafter with the checkpoint's weights, and the target's embedding and head where it brings none.

    Raises DraftmillError where a weight is missing, left over, of another shape or not finite.
    """
    tensors = dict(tensors)
    if HEAD not in tensors and "lm_head.bias" in head:
        raise DraftmillError(
            f"{folder}: borrows the target's head, which has a bias; speculators' model has none, so its "
            "proposals would be others."
        )
    kept = tensors["t2d"] if "t2d" in tensors else slice(None)
    tensors.setdefault(EMBEDDING, head[EMBEDDING])
    tensors.setdefault(HEAD, head[HEAD][kept])
    expected = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    given = {name: tuple(t.shape) for name, t in tensors.items()}
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise DraftmillError(
                f"{folder}: its weights do not fit its config.json: {name} is {given.get(name, 'missing')}, expected "
                f"{expected.get(name, 'no such weight')}; the drafter has other parts than its config.json says, "
                "or is incomplete."
            )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DraftmillError(f"{folder}: {name} is not finite; download the checkpoint again.")
    drafter.load_state_dict(tensors, assign=True)
    return drafter


def check_written(config: SpeculatorModelConfig, output: Path) -> None:
    """What is read back must be what was imported, rotary angles and windows above all."""
    made = config.transformer_layer_config.to_dict()
    read = SpeculatorModelConfig.from_pretrained(output).transformer_layer_config.to_dict()
    for key in sorted(made.keys() | read.keys()):
        if made.get(key) != read.get(key):
            raise DraftmillError(
                f"{output}/config.json: {key} of the drafter's layers came back as {read.get(key)!r}, expected "
                f"{made.get(key)!r}; this checkpoint cannot be imported."
            )


if __name__ == "__main__":
    main()
