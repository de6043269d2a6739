"""Where a target's files are, before anything of it is loaded."""

import importlib.util
from pathlib import Path

from draftmill.errors import DraftmillError


def package_file(package: str, name: str) -> Path:
    """The path of a file in an installed package, which is not imported.

    Raises DraftmillError where the package or the file is missing.
    """
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise DraftmillError(
            f"config: 'target.package' is {package}, which is not installed here; `make demo` "
            "installs it from envs/target-smollm2.txt."
        )
    path = Path(spec.submodule_search_locations[0]) / name
    if not path.is_file():
        raise DraftmillError(f"config: 'target.gguf': {package} carries no file {name}.")
    return path
