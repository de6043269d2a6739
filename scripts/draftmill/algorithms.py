"""The drafting algorithms: one module each, imported by name, so that code of one hangs on no other.

A script that takes one by name has it among the `modules` of its settings. What they offer, and where it is
described:

- an algorithm (eagle3.py): DRAFTING, "chain" or "block"; to train, config_of, empty, new_drafter, initialise, heads, entry,
  prepared, length and WithTargets; to check and to measure, load, check_target and drafts. A block drafter also has
  FIRST, the first slot that drafts.
- `foreign_` (foreign_eagle3.py), for those in drafter_config.FOREIGN: read, described and skeleton.
- `audited_` (audited_eagle3.py): CHECKS, those of this algorithm alone by name; Heads (audit_heads.py), drafts,
  weights, wrong_inputs, nudged, made_random and windows.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

NAMES = ("eagle3", "dflash", "dflash2", "dspark")
PREFIXES = ("", "foreign_", "audited_")  # the algorithm; its foreign checkpoints; its audit


def module_of(algorithm: str, prefix: str = "") -> str:
    """The dotted name of an algorithm's module."""
    if algorithm not in NAMES or prefix not in PREFIXES:
        raise ValueError(f"no module for {prefix}{algorithm}")
    return f"draftmill.{prefix}{algorithm}"


def load(algorithm: str, prefix: str = "") -> ModuleType:
    return importlib.import_module(module_of(algorithm, prefix))


def files(scripts: Path) -> Iterator[str]:
    """Every such module's file, as a path under scripts/."""
    for algorithm in NAMES:
        for prefix in PREFIXES:
            file = module_of(algorithm, prefix).replace(".", "/") + ".py"
            if (scripts / file).is_file():
                yield file
