"""What identifies the files of a drafter that others trained, without loading them."""

from pathlib import Path

from draftmill.driver.target_source import files_digest
from draftmill.errors import DraftmillError

WEIGHTS = (".safetensors", ".bin")
READ = (".json", *WEIGHTS)


def digest(name: str, drafter: dict) -> str:
    """The revision on the hub, or a digest of the folder's files.

    name, drafter: its key and section in `drafters`. Raises DraftmillError where weights are missing.
    """
    if drafter["hub"]:
        return drafter["revision"]
    folder = Path(drafter["path"])
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in READ)
    if not any(path.suffix in WEIGHTS for path in files):
        raise DraftmillError(
            f"config: 'drafters.{name}.path': {folder} holds no weights (*.safetensors or *.bin); complete the "
            "download."
        )
    return files_digest(files)
