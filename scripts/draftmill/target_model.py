"""The whole target in memory."""

from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from torch import nn

from draftmill.atomic import sha256_of
from draftmill.devices import best_device, is_the_machines
from draftmill.dtype_policy import DTYPES, Ledger
from draftmill.errors import DraftmillError, damaged
from draftmill.target_skeleton import Skeleton, blueprint, widen

transformers.utils.logging.disable_progress_bar()  # a bar in a log file is noise


def load(manifest: dict, dtype: str, ledger: Ledger) -> nn.Module:
    """The whole target in evaluation mode, every weight from the checkpoint, over all GPUs that there are.

    Raises DraftmillError where the checkpoint lacks a weight (it would be random otherwise), and where one has
    another dtype than declared.
    """
    folder = manifest["checkpoint"]
    for name, digest in manifest.get("files", {}).items():  # of a checkpoint that was built here
        if sha256_of(Path(folder) / name) != digest:
            raise damaged(Path(folder) / name, "not the bytes that were built")
    kind, config = blueprint(manifest, DTYPES[dtype])
    spread = "auto" if torch.cuda.device_count() > 1 else {"": best_device()}
    try:
        model, info = kind.from_pretrained(
            folder,
            config=config,
            dtype=config.dtype,
            device_map=spread,
            output_loading_info=True,
        )
    except (RuntimeError, ValueError, ImportError, SafetensorError) as error:
        if is_the_machines(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise DraftmillError(
            f"{folder}: transformers cannot load the weights ({reason}); download the checkpoint again."
        ) from error
    away = {"cpu", "disk"} & set(map(str, getattr(model, "hf_device_map", {}).values()))
    if torch.cuda.is_available() and away:
        raise DraftmillError(
            f"{folder}: the target does not fit into the memory of the GPUs (parts of it would be on "
            f"{', '.join(sorted(away))}); set the resource backend=streamed."
        )
    for problem in ("missing_keys", "mismatched_keys"):
        if info[problem]:
            first = sorted(map(str, info[problem]))[0]
            raise DraftmillError(
                f"{folder}: {len(info[problem])} weights that the model needs are missing or do not fit "
                f"({problem}: {first} first); they would be random; complete the checkpoint."
            )
    skeleton = Skeleton(manifest, DTYPES[dtype], "cpu")
    if skeleton.quantizer:
        widen(model, DTYPES[dtype], skeleton.dtypes)
    note_kept(ledger, skeleton.dtypes, dtype)
    check_dtypes(ledger, model, dtype, skeleton.dtypes)
    return model.eval().requires_grad_(False)


def check_dtypes(
    ledger: Ledger, module: nn.Module, dtype: str, family: dict, path: str = ""
) -> None:
    """Every weight has the declared dtype, or float32 where the family itself keeps it so (router biases,
    for example).

    family: parameter -> dtype as transformers makes it. path: of the module in the model.
    """
    for name, weight in module.named_parameters():
        if weight.is_floating_point() and not weight.is_meta:
            wanted = family.get(path + name, DTYPES[dtype])
            kept = wanted == torch.float32 and dtype != "float32"
            about = f"target weights ({path + name})"
            ledger.expect(about, weight.dtype, "float32" if kept else dtype)
            del ledger[about]
    ledger["target weights"] = dtype


def note_kept(ledger: Ledger, family: dict, dtype: str) -> None:
    """Writes down that the family keeps some weights in float32, where it does."""
    if dtype != "float32" and torch.float32 in family.values():
        ledger["target weights that the family keeps in float32"] = "float32"
