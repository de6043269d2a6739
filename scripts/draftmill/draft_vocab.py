"""The draft vocabulary's two maps, in the layout that speculators and vLLM read.

t2d: bool [target vocabulary], true for the kept tokens.
d2t: int64 [draft vocabulary], OFFSETS: target id = draft id + d2t[draft id].
"""

from collections import Counter
from collections.abc import Container
from pathlib import Path

import torch

from draftmill import tensor_files
from draftmill.errors import DraftmillError


def most_frequent(
    counts: Counter, size: int, vocab: int, always: list[int], left_out: Container = ()
) -> list[int]:
    """`size` token ids in ascending order: `always`, then by falling count, then the lowest ids that are not
    `left_out`."""
    ranked = [*always, *(token for token, _ in sorted(counts.items(), key=lambda c: (-c[1], c[0])))]
    chosen = list(dict.fromkeys(ranked))[:size]
    taken = set(chosen)
    spare = (token for token in range(vocab) if token not in taken and token not in left_out)
    return sorted(chosen + [next(spare) for _ in range(size - len(chosen))])


def save(path: Path, chosen: list[int], vocab: int, record: dict) -> None:
    ids = torch.tensor(chosen)
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[ids] = True
    tensor_files.write(path, {"t2d": t2d, "d2t": ids - torch.arange(len(chosen))}, record)


def read(path: str | Path) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """t2d, d2t and the record.

    Raises DraftmillError where the two maps contradict each other.
    """
    tensors, record = tensor_files.read(path)
    t2d, d2t = tensors["t2d"], tensors["d2t"]
    check(t2d, d2t, str(path))
    return t2d, d2t, record


def check(t2d: torch.Tensor, d2t: torch.Tensor, where: str) -> None:
    """Refuses maps that do not describe one another (absolute ids, zeros, another size)."""
    kept = t2d.nonzero().flatten()
    if len(kept) != len(d2t) or not torch.equal(kept, d2t + torch.arange(len(d2t))):
        raise DraftmillError(
            f"{where}: d2t must hold offsets that lead from draft ids to exactly the {len(kept)} "
            "tokens of t2d; these two maps contradict each other."
        )
