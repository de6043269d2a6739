"""What the weights of an exported drafter must be, before a single draft is made of them."""

from pathlib import Path

import torch
from torch import nn

from draftmill.atomic import sha256_of
from draftmill.errors import DraftmillError

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
NORM_RATIO = 100  # to the median, beyond which a layer's share in fc is named


def check_files(folder: Path, files: dict[str, str]) -> None:
    """Refuses files whose SHA-256 is not the one that was recorded when they were written."""
    for name, digest in files.items():
        if sha256_of(folder / name) != digest:
            raise DraftmillError(
                f"check: files: {folder / name} is not what was written (its SHA-256 is not the one in run.json); "
                "it was edited or damaged since; delete it and start Snakemake again to make it anew."
            )


def check_values(drafter: nn.Module, folder: Path) -> dict:
    """Every weight is finite; no matrix of one value, no tensor of zeros.

    Returns the number of tensors and of parameters.
    """
    for name, tensor in drafter.named_parameters():
        if not tensor.isfinite().all():
            raise DraftmillError(
                f"check: weights: {name} in {folder}/model.safetensors is not finite; look at the loss and the "
                "gradient norm in metrics.parquet, lower training.learning_rate and train anew."
            )
        if not tensor.any() or (tensor.dim() > 1 and (tensor == tensor.flatten()[0]).all()):
            raise DraftmillError(
                f"check: weights: {name} in {folder}/model.safetensors is {float(tensor.flatten()[0]):g} throughout: "
                "it was never trained, or lost when the drafter was exported."
            )
    sizes = [p.numel() for p in drafter.parameters()]
    return {"tensors": len(sizes), "parameters": sum(sizes)}


def check_ends(
    drafter: nn.Module, head: dict[str, torch.Tensor], imported: bool, folder: Path
) -> dict[str, bool]:
    """Whether embedding and lm_head are the target's own rows, bit for bit.

    head: head.safetensors. A drafter of others may have its own; then that is only recorded.
    """
    kept = slice(None) if drafter.t2d is None else drafter.t2d.bool().cpu()
    rows = len(drafter.embed_tokens.weight)
    pairs = {
        EMBEDDING: (drafter.embed_tokens.weight, head[EMBEDDING][:rows]),
        HEAD: (drafter.lm_head.weight, head[HEAD][kept]),
    }
    found = {name: torch.equal(own.cpu(), target) for name, (own, target) in pairs.items()}
    for name, equal in found.items():
        if not equal and not imported:
            raise DraftmillError(
                f"check: target rows: {name} in {folder}/model.safetensors is not the target's own, though training "
                "keeps it frozen: it is of another target, of other rows (t2d), or was trained or cast by mistake; "
                "compare with target/head.safetensors."
            )
    return found


def fc_norms(drafter: nn.Module, layers: list[int]) -> tuple[list[float], list[str]]:
    """The mean norm of fc's columns for each captured layer, [layers], and warnings that name output_of."""
    weight = drafter.fc.weight.detach().float()
    norms = weight.norm(dim=0).view(len(layers), -1).mean(1)
    median = float(norms.median())
    warnings = []
    for layer, norm in zip(layers, norms.tolist(), strict=True):
        if norm == 0:
            warnings.append(f"fc's columns of output_of {layer} are zero: that layer is not used.")
        elif median and norm > NORM_RATIO * median:
            warnings.append(
                f"fc's columns of output_of {layer} are {norm / median:.0f} times as long as those of the median "
                "layer: that layer's states may be far smaller than the others', or wrong."
            )
    return norms.tolist(), warnings
