"""The draft vocabulary: which tokens it keeps, and maps that must describe one another."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from draftmill import draft_vocab, tensor_files
from draftmill.errors import DraftmillError

RECORD = {"fingerprint": "0123456789abcdef", "coverage": 0.5}
CHOSEN = [2, 5, 6, 9]


@pytest.fixture
def saved(tmp_path) -> Path:
    path = tmp_path / "draft_vocab.safetensors"
    draft_vocab.save(path, CHOSEN, 12, RECORD)
    return path


@pytest.fixture
def altered(saved):
    """Tensors of the file -> the path, once they are replaced."""

    def alter(**tensors: torch.Tensor) -> Path:
        tensor_files.write(saved, load_file(saved) | tensors, RECORD)
        return saved

    return alter


def test_the_most_frequent_tokens_are_kept_in_ascending_order():
    counts = Counter({7: 5, 3: 9, 1: 5, 8: 1})
    assert draft_vocab.most_frequent(counts, 3, 10, []) == [1, 3, 7]


def test_equal_counts_prefer_the_lowest_id():
    assert draft_vocab.most_frequent(Counter({9: 2, 4: 2, 6: 2}), 2, 10, []) == [4, 6]


def test_the_end_tokens_are_always_kept():
    assert draft_vocab.most_frequent(Counter({1: 9, 2: 8, 3: 7}), 2, 10, [5]) == [1, 5]


def test_unseen_tokens_fill_up_from_the_lowest_id():
    assert draft_vocab.most_frequent(Counter({1: 3}), 4, 10, [8]) == [0, 1, 2, 8]


def test_a_mask_token_never_fills_up():
    assert draft_vocab.most_frequent(Counter({1: 3}), 4, 10, [8], {2}) == [0, 1, 3, 8]


@given(
    counts=st.dictionaries(st.integers(0, 29), st.integers(1, 5)),
    size=st.integers(2, 30),
    always=st.lists(st.integers(0, 29), max_size=2),
)
def test_no_token_left_out_is_more_frequent_than_one_kept(counts, size, always):
    chosen = draft_vocab.most_frequent(Counter(counts), size, 30, always)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == size
    assert set(always) <= set(chosen)
    free = [counts.get(t, 0) for t in set(chosen) - set(always)]
    left = [counts.get(t, 0) for t in set(range(30)) - set(chosen)]
    assert not free or not left or min(free) >= max(left)


@given(st.sets(st.integers(0, 49), min_size=1).map(sorted))
def test_the_offsets_lead_from_draft_ids_to_the_chosen_tokens(chosen):
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "write", lambda path, tensors, _: made.update(tensors))
        draft_vocab.save(Path("unused"), chosen, 50, RECORD)
    assert (torch.arange(len(chosen)) + made["d2t"]).tolist() == chosen
    assert made["t2d"].nonzero().flatten().tolist() == chosen
    assert (made["t2d"].dtype, made["d2t"].dtype) == (torch.bool, torch.int64)
    draft_vocab.check(made["t2d"], made["d2t"], "unused")


def test_maps_and_record_come_back(saved):
    t2d, d2t, record = draft_vocab.read(saved)
    assert t2d.tolist() == [i in CHOSEN for i in range(12)]
    assert d2t.tolist() == [2, 4, 4, 6]
    assert record == RECORD


@pytest.mark.parametrize(
    "d2t",
    [
        CHOSEN,
        [0, 0, 0, 0],
        [2, 4, 4],
        [2, 4, 4, 6, 6],
        [2, 4, 4, 7],
        [2, 4, 5, 5],
        [],
        [2, 4, 4, -9],
    ],
    ids=["absolute", "zeros", "short", "long", "other", "swapped", "empty", "negative"],
)
def test_offsets_that_contradict_the_kept_tokens_are_refused_by_name(d2t, altered):
    path = altered(d2t=torch.tensor(d2t, dtype=torch.int64))
    with pytest.raises(DraftmillError, match="must hold offsets") as caught:
        draft_vocab.read(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("token", [0, 5])
def test_a_kept_token_more_or_less_is_refused(token, altered):
    t2d = torch.tensor([i in CHOSEN for i in range(12)])
    t2d[token] = ~t2d[token]
    with pytest.raises(DraftmillError, match=r"exactly the [35] tokens"):
        draft_vocab.read(altered(t2d=t2d))


def test_a_full_disk_is_refused_by_name_and_leaves_nothing(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    def full(tensors, path, metadata) -> None:  # word for word what safetensors raises
        Path(path).write_bytes(b"part")
        text = "Error while serializing: I/O error: No space left on device (os error 28)"
        raise SafetensorError(text)

    monkeypatch.setattr(tensor_files, "save_file", full)
    with pytest.raises(DraftmillError, match=r"vocab\.safetensors: no space left"):
        draft_vocab.save(tmp_path / "vocab.safetensors", CHOSEN, 12, RECORD)
    assert list(tmp_path.iterdir()) == []
