"""Prompts about the public callables of Python's standard library.

The list of callables is committed (resources/stdlib_callables.txt), so that the prompts do not depend
on the Python that runs. Each callable gives one prompt, so that disjoint row ranges are disjoint
subjects.
"""

import random
from pathlib import Path

CALLABLES = Path(__file__).resolve().parents[2] / "resources" / "stdlib_callables.txt"
TEMPLATES = (
    "Explain what `{}` does in Python and show a short example.",
    "Write a small Python function that uses `{}`, with a docstring.",
    "What are common mistakes when using `{}` in Python?",
)
ORDER_SEED = 20240229  # any constant: it fixes one order for everybody


def stdlib_prompts() -> list[str]:
    """All prompts, in one fixed shuffled order."""
    names = CALLABLES.read_text(encoding="utf-8").split()
    random.Random(ORDER_SEED).shuffle(names)
    return [TEMPLATES[i % len(TEMPLATES)].format(name) for i, name in enumerate(names)]
