"""The share of greedy text: counted over a whole answer, made of few logits at a time."""

from pathlib import Path

import pytest
import torch
from torch import nn

from draftmill import greedy_text
from draftmill.shard_reader import Shard
from draftmill.shard_writer import new_shard

HIDDEN = 8
STARTS = {600: 1, 257: 1, 258: 1, 5: 4, 300: 40}  # tokens of a sample -> its answer's first


class Head(nn.Module):
    """A norm-free head that keeps the shapes of the logits it made."""

    def __init__(self, vocab: int = 12):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.lm_head = nn.Linear(HIDDEN, vocab, bias=False)
        self.lm_head.weight.data = torch.randn(vocab, HIDDEN, generator=generator)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(states)
        self.shapes.append(tuple(logits.shape))
        return logits


def shard_of(path: Path, head: Head, lengths: list[int]) -> tuple[Shard, float | None]:
    """A shard of random states, two thirds of its ids greedy; and its share of greedy text, at once."""
    generator, right = torch.Generator().manual_seed(0), []
    with new_shard(path, [], HIDDEN, "float32", {"fingerprint": "f"}) as shard:
        for number, tokens in enumerate(lengths):
            states = torch.randn(tokens, HIDDEN, generator=generator)
            choice = head.lm_head(states).argmax(-1).tolist()
            ids = [0] + [c if i % 3 else (c + 1) % 12 for i, c in enumerate(choice[:-1])]
            start = STARTS[tokens]
            right += [ids[i + 1] == choice[i] for i in range(start, tokens - 1)]
            about = {"row": number, "turn": 1, "category": "all", "start": start}
            shard.append(about, ids, [1] * tokens, [states])
    return Shard(path, "float32"), sum(right) / len(right) if right else None


@pytest.mark.parametrize("lengths", [[600], [257, 258], [5], [5, 300, 600]])
def test_the_share_is_that_of_all_answers_tokens_whatever_their_lengths(lengths, tmp_path):
    head = Head()
    shard, expected = shard_of(tmp_path / "shard.parquet", head, lengths)
    assert greedy_text.greedy_share(shard, head) == expected


def test_never_more_than_256_rows_of_logits_are_made_at_a_time(tmp_path):
    head = Head()
    shard, _ = shard_of(tmp_path / "shard.parquet", head, [600])
    greedy_text.greedy_share(shard, head)
    assert [rows for _, rows, _ in head.shapes] == [256, 256, 86]
