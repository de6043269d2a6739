"""An exported drafter in speculators' layout: config.json and model.safetensors, read strictly."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from speculators import SpeculatorModelConfig
from torch import nn

from draftmill import draft_vocab
from draftmill.errors import DraftmillError, damaged


def read_config(folder: Path) -> SpeculatorModelConfig:
    """speculators' configuration in a drafter's folder. Raises DraftmillError where it is none."""
    try:
        return SpeculatorModelConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise damaged(folder / "config.json", error) from None


def filled(model: nn.Module, folder: Path) -> nn.Module:
    """The model with every weight from the folder's file, in that file's dtypes.

    Raises DraftmillError where keys are missing or left over.
    """
    try:
        tensors = load_file(folder / "model.safetensors")
    except SafetensorError as error:
        raise damaged(folder / "model.safetensors", error) from None
    try:
        found = model.load_state_dict(tensors, strict=False, assign=True)
        wrong = [*found.missing_keys, *found.unexpected_keys][:3]
    except RuntimeError as error:  # other shapes
        wrong = str(error).splitlines()[-1:]
    if wrong:
        raise DraftmillError(
            f"{folder}/model.safetensors: does not fit its config.json ({', '.join(wrong).strip()}); delete it "
            "and start Snakemake again to make it anew."
        )
    if model.d2t is not None:
        draft_vocab.check(model.t2d.bool(), model.d2t, f"{folder}/model.safetensors")
    return model.eval()


def check_target(
    model: nn.Module, ids: list[int], manifest: dict, layers: list[int], folder: Path
) -> None:
    """Refuses a drafter that was made for another target, whatever fingerprints it carries.

    ids: its layers by speculators' count. layers: output_of of the states it is to read.
    Raises DraftmillError that names both.
    """
    config = model.config
    verifier = config.speculators_config.verifier
    known = manifest["vocab_size"] if model.t2d is None else len(model.t2d)
    pairs = {
        "hidden size": (config.transformer_layer_config.hidden_size, manifest["hidden_size"]),
        "embedded tokens": (model.embed_tokens.weight.shape[0], manifest["embedding_rows"]),
        "vocabulary": (known, manifest["vocab_size"]),
        "layers (ids of speculators)": (ids, [layer + 1 for layer in layers]),
        "name": (verifier.name_or_path, manifest["name"]),
        "architectures": (verifier.architectures, manifest["architectures"]),
    }
    for what, (found, expected) in pairs.items():
        if found != expected:
            raise DraftmillError(
                f"{folder}/config.json: this drafter was made for another target: {what} {found}, but the run's "
                f"target {manifest['name']} has {expected}; delete the drafter and start Snakemake again to "
                "make one for this target."
            )
