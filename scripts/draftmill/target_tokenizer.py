"""The target's tokenizer: where it is, whether its own code runs, and its digests."""

import hashlib
from pathlib import Path

import transformers
from huggingface_hub import snapshot_download

from draftmill import tokenizer_files
from draftmill.errors import DraftmillError


def source_of(settings: dict, checkpoint: str) -> dict:
    """The manifest's tokenizer_source: the folder (the checkpoint's unless the settings name another) and
    whether the tokenizer's own code may run. A hub tokenizer is fetched, without weights."""
    if settings["hub"]:
        weights = [f"*{suffix}" for suffix in tokenizer_files.WEIGHTS]
        folder = snapshot_download(
            settings["hub"], revision=settings["revision"], ignore_patterns=weights
        )
    else:
        folder = str(Path(settings["path"]).resolve()) if settings["path"] else checkpoint
    return {"folder": folder, "trust_remote_code": settings["trust_remote_code"]}


def tokenizer_of(manifest: dict) -> transformers.PreTrainedTokenizerBase:
    return load(**manifest["tokenizer_source"])


def load(
    folder: str, trust_remote_code: bool, as_file: bool = False
) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer in a folder; its own code is imported only where it may run.

    as_file: take tokenizer.json as it is, not by the class that transformers has for the family.

    Raises DraftmillError where it does not load, or where its code would come from somewhere else.
    """
    if not Path(folder).is_dir():
        raise DraftmillError(
            f"{folder}: the folder of the target's tokenizer is gone; put it back, or correct "
            "target.tokenizer."
        )
    own = tokenizer_files.own_code(folder)
    if trust_remote_code:
        refuse_foreign_code(folder, own)
    try:
        if as_file:
            return transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        return transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, config=config_without_code(folder)
        )
    except (ImportError, OSError, ValueError) as error:
        if own and not trust_remote_code:
            raise DraftmillError(
                f"{folder}: the tokenizer needs its own code ({own[-1]}), which may not run; read it, then set "
                "target.tokenizer.trust_remote_code: true."
            ) from error
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DraftmillError(
            f"{folder}: the tokenizer does not load ({reason}); complete the folder, or name another in "
            "target.tokenizer.path."
        ) from error


def refuse_foreign_code(folder: str, own: list[str]) -> None:
    """Code of another repository has no pinned revision: it could change under a finished run."""
    for name in own:
        if "--" in name:
            raise DraftmillError(
                f"{folder}/tokenizer_config.json: takes its code from another repository ({name}), of "
                "which no revision is pinned; copy the tokenizer and that code into one folder and name "
                "it in target.tokenizer.path."
            )


def config_without_code(folder: str) -> transformers.PretrainedConfig | None:
    """The configuration beside the tokenizer, from which transformers chooses a class: that the tokenizer's
    code may run allows no other code to run."""
    if not (Path(folder) / "config.json").is_file():
        return None
    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError:  # a model type that only its own code knows
        return transformers.PretrainedConfig.from_pretrained(folder)


def tokenizer_digest(manifest: dict) -> str:
    """One digest over the tokenizer's files, its code included where it runs."""
    source = manifest["tokenizer_source"]
    return tokenizer_files.tokenizer_digest(source["folder"], source["trust_remote_code"])


def template_digest(tokenizer: transformers.PreTrainedTokenizerBase) -> str | None:
    """A digest of the chat template's text; None where the tokenizer has none."""
    template = tokenizer.chat_template
    return None if template is None else hashlib.sha256(str(template).encode()).hexdigest()[:16]
