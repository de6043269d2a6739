"""The one exception for everything a user can mend."""

from pathlib import Path


class DraftmillError(Exception):
    """One sentence: the file or key, what was found, what was expected, what to do."""


def damaged(path: str | Path, reason: object) -> DraftmillError:
    """The error for a file that cannot be read as what it should be."""
    text = (str(reason).splitlines() or [type(reason).__name__])[0][:160]
    return DraftmillError(
        f"{path}: damaged or not a file of this project ({text}); delete it and start Snakemake again "
        "to rebuild it."
    )


def broken(path: str | Path, reason: object) -> DraftmillError:
    """The error for a file of the target's checkpoint that is not what it should be."""
    text = (str(reason).splitlines() or [type(reason).__name__])[0][:200]
    return DraftmillError(f"{path}: damaged or incomplete ({text}); download the checkpoint again.")
