"""The target's config.json for planning: found without a download, read without its weights."""

from pathlib import Path

import huggingface_hub
import transformers

from draftmill.errors import DraftmillError
from draftmill.target_config import check_supported
from draftmill.target_location import package_file


def target_config(target: dict, given: Path | None = None) -> tuple[object, str]:
    """The target's transformers configuration, and where it was found.

    Looked for in this order: `given`; the checkpoint's folder; the GGUF header; the local hub cache;
    `target.config`. Raises DraftmillError where none of them is there, none can be read, or the stages would
    refuse the model.
    """
    if given is None and target["package"]:
        path = package_file(target["package"], target["gguf"])
        return transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name), str(path)
    path = given or config_file(target)
    if not path.is_file():
        raise DraftmillError(
            f"{path}: does not exist; give the target's config.json with --target-config."
        )
    try:
        # a single file brings no code with it, so only transformers' own classes can read it
        found = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DraftmillError(
            f"{path}: transformers {transformers.__version__} cannot read it ({reason}); give the "
            "config.json of a family that it knows."
        ) from None
    check_supported(found)
    return found, str(path)


def config_file(target: dict) -> Path:
    """The config.json of a target that is no GGUF. Raises DraftmillError where there is none here."""
    if target["path"]:
        path = Path(target["path"]) / "config.json"
        if path.is_file() or not target["config"]:
            return path
    elif cached := hub_file(target, "config.json"):
        return cached
    if target["config"]:
        return Path(target["config"])
    raise DraftmillError(
        f"target: {target['hub']} at {target['revision'][:12]} is not in the local hub cache, and planning "
        "downloads nothing; give its config.json with --target-config FILE or 'target.config'."
    )


def hub_file(target: dict, name: str) -> Path | None:
    """A file of the hub checkpoint where it was downloaded before; None where it was not."""
    found = huggingface_hub.try_to_load_from_cache(target["hub"], name, revision=target["revision"])
    return Path(found) if isinstance(found, str) else None


def checkpoint_folder(target: dict, root: str) -> Path | None:
    """The target's folder, where it is at hand; for a GGUF, the one that the run built.

    root: results/{run}.
    """
    if target["path"]:
        folder = Path(target["path"])
    elif target["hub"]:
        cached = hub_file(target, "config.json")
        folder = cached.parent if cached else None
    else:
        folder = Path(root) / "target" / "checkpoint"
    return folder if folder and (folder / "config.json").is_file() else None


def tokenizer_folder(target: dict, folder: Path | None) -> Path | None:
    """The folder with the tokenizer that the stages take, where it is at hand.

    folder: of the checkpoint, which has it unless the configuration names another.
    """
    settings = target["tokenizer"]
    if settings["path"]:
        folder = Path(settings["path"])
    elif settings["hub"]:
        cached = hub_file(settings, "tokenizer_config.json")
        folder = cached.parent if cached else None
    return folder if folder and (folder / "tokenizer_config.json").is_file() else None
