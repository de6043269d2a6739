"""A finished drafter's files, written in speculators' layout (exported_drafter reads them)."""

import json
import tempfile
from pathlib import Path

from safetensors.torch import save_file
from speculators import SpeculatorModelConfig
from torch import nn

from draftmill.atomic import atomic_path, sha256_of, write_text
from draftmill.dtype_policy import DTYPES, Ledger, cast

FILES = ("config.json", "model.safetensors")


def export(
    drafter: nn.Module, config: SpeculatorModelConfig, dtype: str, folder: Path, ledger: Ledger
) -> None:
    """config.json and model.safetensors, every weight in the declared dtype."""
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


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each."""
    return {name: sha256_of(folder / name) for name in FILES}
