"""What identifies the target's tokenizer, without loading it."""

from pathlib import Path

from draftmill.atomic import sha256_of
from draftmill.errors import DraftmillError
from draftmill.tokenizer_files import folder_digest, tokenizer_files


def settings_of(tokenizer: dict) -> dict:
    """The tokenizer's slice of the target's settings. A golden table stands in it by its content alone, so
    that it may be moved; the checkpoint's own tokenizer is in the digest of the target.

    Raises DraftmillError where a folder or a table is missing.
    """
    slice_ = {k: tokenizer[k] for k in ("path", "hub", "revision", "trust_remote_code")}
    return slice_ | {"digest": digest(tokenizer["path"]), "golden": golden(tokenizer["golden"])}


def digest(path: str | None) -> str | None:
    if path is None:
        return None
    if not Path(path).is_dir() or not tokenizer_files(path, code=True):
        raise DraftmillError(
            f"config: 'target.tokenizer.path': {path} is no folder with a tokenizer's files."
        )
    return folder_digest(path)


def golden(path: str | None) -> str | None:
    if path is None:
        return None
    if not Path(path).is_file():
        raise DraftmillError(
            f"config: 'target.tokenizer.golden': {path} does not exist; scripts/make_golden_table.py makes it."
        )
    return sha256_of(path)
