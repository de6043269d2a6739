"""Packing: every sample is in exactly one pack, and no pack is too long."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from draftmill.packing import LOOKAHEAD, epoch_order, pack, packs

lengths_of_samples = st.lists(st.integers(1, 30), max_size=30)


@given(lengths_of_samples, st.integers(1, 40), st.integers(0, 9), st.integers(0, 9))
def test_packs_lose_and_repeat_no_sample_and_respect_the_limit(lengths, limit, seed, epoch):
    order = epoch_order(len(lengths), seed, epoch)
    found = list(packs(order, lengths, limit))
    assert sorted(index for group in found for index in group) == sorted(order)
    assert all(found)
    for group in found:
        assert sum(min(lengths[i], limit) for i in group) <= limit


@given(lengths_of_samples, st.integers(1, 40))
def test_each_pack_begins_with_the_first_sample_that_is_left(lengths, limit):
    left = list(range(len(lengths)))
    for group in packs(list(left), lengths, limit):
        assert group[0] == left[0]
        left = [index for index in left if index not in group]


@given(lengths_of_samples, st.integers(1, 40))
def test_what_is_left_near_a_pack_does_not_fit_it(lengths, limit):
    cut = [min(length, limit) for length in lengths]
    left = list(range(len(lengths)))
    for group in packs(list(left), lengths, limit):
        left = [index for index in left if index not in group]
        room = limit - sum(cut[i] for i in group)
        assert all(cut[i] > room for i in left[: LOOKAHEAD - len(group)])


def test_a_sample_longer_than_the_limit_has_a_pack_of_its_own():
    assert list(packs([0, 1, 2], [3, 50, 3], 10)) == [[0, 2], [1]]


@given(st.integers(0, 60), st.integers(0, 2**40), st.integers(0, 10**6))
def test_the_order_of_an_epoch_is_a_permutation_that_seed_and_epoch_alone_decide(
    count, seed, epoch
):
    order = epoch_order(count, seed, epoch)
    assert sorted(order) == list(range(count))
    assert epoch_order(count, seed, epoch) == order


def test_the_order_is_the_same_on_every_machine():
    assert epoch_order(8, 0, 0) == [0, 2, 1, 4, 6, 7, 3, 5]
    assert epoch_order(8, 0, 0) != epoch_order(8, 0, 1)
    assert epoch_order(8, 0, 0) != epoch_order(8, 1, 0)
    assert epoch_order(50, 1, 11) != epoch_order(50, 11, 1)


def sample(tokens: int, first: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(first, first + tokens)
    states = ids[:, None].repeat(1, 3).bfloat16()
    return {"input_ids": ids, "aux": states, "position_ids": torch.arange(1, tokens + 1)}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 12))
def test_a_batch_holds_its_samples_side_by_side_with_their_numbers(lengths, padding):
    samples = [sample(tokens, 100 * i) for i, tokens in enumerate(lengths)]
    total = sum(lengths) + padding
    batch = pack(samples, total)
    kept = [min(tokens, total) for tokens in lengths]
    size = -(-total // 128) * 128
    assert {tuple(v.shape[:2]) for v in batch.values()} == {(1, size)}
    numbers = [i for i, tokens in enumerate(kept) for _ in range(tokens)]
    assert batch["document_ids"].tolist() == [numbers + [-1] * (size - len(numbers))]
    assert batch["document_ids"].dtype == torch.int64
    for i, tokens in enumerate(kept):
        here = batch["document_ids"][0] == i
        for name, value in samples[i].items():
            assert torch.equal(batch[name][0, here], value[:tokens])
            assert batch[name].dtype == value.dtype
