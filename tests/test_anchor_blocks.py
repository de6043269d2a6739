"""Which anchors are trained, which slots count, and what a slot sees: against slow references."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.nn.attention.flex_attention import create_mask, flex_attention

from draftmill import anchor_blocks
from draftmill.dflash import prepared
from draftmill.packing import pack, packs

masks = st.lists(st.booleans(), min_size=1, max_size=40).map(lambda m: torch.tensor(m))
counts = st.integers(1, 12)
draws = st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 99))


def name(seed: int, epoch: int, index: int) -> str:
    return f"{seed}/{epoch}/{index}"


def reachable(mask: torch.Tensor) -> set[int]:
    """Every answer's tokens but its last."""
    flags = mask.tolist()
    return {i for i in range(len(flags) - 1) if flags[i] and flags[i + 1]}


def places(anchors: torch.Tensor) -> set[int]:
    return set(anchors.nonzero().flatten().tolist())


@given(masks, counts, draws)
def test_anchors_are_answer_tokens_with_a_successor_and_no_more_than_asked_for(mask, count, draw):
    found = anchor_blocks.drawn(mask, count, name(*draw))
    assert (found.shape, found.dtype) == (mask.shape, torch.bool)
    assert places(found) <= reachable(mask)
    assert len(places(found)) == min(count, len(reachable(mask)))


@given(st.lists(masks, min_size=1, max_size=6), counts, draws, st.randoms(use_true_random=False))
def test_a_samples_anchors_are_its_own_in_any_pack(several, count, draw, random):
    """A function of seed, epoch and sample: the order, the neighbours and the packs change nothing."""
    seed, epoch, _ = draw
    prepare = prepared({"training": {"anchors": count}})

    def sample(i: int) -> dict:
        return {"input_ids": torch.full_like(several[i], i, dtype=torch.long)} | {
            "loss_mask": several[i]
        }

    expected = {
        i: anchor_blocks.drawn(mask, count, name(seed, epoch, i)).tolist()
        for i, mask in enumerate(several)
    }
    order = list(range(len(several)))
    random.shuffle(order)
    limit = random.randint(40, 130)
    seen = set()
    for group in packs(order, [len(mask) for mask in several], limit):
        samples = [prepare(sample(i), name(seed, epoch, i)) for i in group]
        batch = {key: value[0] for key, value in pack(samples, limit).items()}
        for number, i in enumerate(group):
            assert batch["anchors"][batch["document_ids"] == number].tolist() == expected[i]
            seen.add(i)
        assert not batch["anchors"][batch["document_ids"] < 0].any()
    assert seen == set(expected)


def test_anchors_are_drawn_anew_for_each_seed_epoch_and_sample():
    mask = torch.ones(400, dtype=torch.bool)
    names = [(s, e, i) for s in range(3) for e in range(3) for i in range(3)]
    found = {tuple(sorted(places(anchor_blocks.drawn(mask, 20, name(*n))))) for n in names}
    assert len(found) == len(names)
    again = anchor_blocks.drawn(mask, 20, name(1, 2, 0))
    assert torch.equal(again, anchor_blocks.drawn(mask, 20, name(1, 2, 0)))


def test_a_few_epochs_reach_every_token_that_can_be_an_anchor():
    mask = torch.zeros(120, dtype=torch.bool)
    mask[10:40] = mask[60:100] = True
    reached = [places(anchor_blocks.drawn(mask, 16, name(0, epoch, 0))) for epoch in range(40)]
    assert set.union(*reached) == reachable(mask) == {*range(10, 39), *range(60, 99)}
    after = [len(set.union(*reached[: n + 1])) for n in range(4)]
    # a draw of 16 of 68 leaves (52/68)^n of them
    expected = [68 * (1 - (52 / 68) ** (n + 1)) for n in range(4)]
    assert after == pytest.approx(expected, abs=8)


@st.composite
def packed(draw):
    """loss mask, documents (padding -1 behind), anchors and block of a packed row."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    padding = draw(st.integers(0, 9))
    documents = [d for d, size in enumerate(sizes) for _ in range(size)] + [-1] * padding
    size = len(documents)
    flags = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    mask = [flag and d >= 0 for flag, d in zip(flags, documents, strict=True)]
    inside = st.integers(0, sum(sizes) - 1)
    anchors = draw(st.lists(inside, min_size=1, max_size=5, unique=True).map(sorted))
    block = draw(st.integers(2, 8))
    tensors = (torch.tensor(mask), torch.tensor(documents), torch.tensor(anchors))
    return *tensors, block


@given(packed())
def test_a_slot_counts_while_the_answer_goes_on_in_its_document(row):
    mask, documents, anchors, block = row
    found = anchor_blocks.supervised(anchors, block, mask, documents)
    for index, anchor in enumerate(anchors.tolist()):
        going = True
        for slot in range(block):
            place = anchor + slot
            if slot:
                there = place < len(mask) and bool(documents[place] == documents[anchor])
                going = going and there and bool(mask[place])
            assert found[index, slot].item() == (going and slot > 0), (anchor, slot)


def sees(documents, anchors, block, window, whole, query: int, key: int) -> bool:
    """Whether a slot attends to a key: speculators' rule, one at a time."""
    tokens, anchor = len(documents), int(anchors[query // block])
    if key < tokens:
        own = documents[key] == documents[anchor] != -1
        return bool(own) and key < anchor and (window is None or key >= anchor - window)
    other, place = divmod(key - tokens, block)
    ahead = place > query % block
    return other == query // block and not (ahead and window is not None and not whole)


windows = st.sampled_from([(None, False), (1, False), (3, False), (6, False), (3, True)])


@given(packed(), windows)
def test_the_mask_holds_what_each_slot_sees(row, kind):
    _, documents, anchors, block = row
    window, whole = kind
    found = anchor_blocks.visibility(documents, anchors, block, window, "cpu", whole)
    queries, keys = len(anchors) * block, len(documents) + len(anchors) * block
    assert (found.shape, found.dtype) == ((1, 1, queries, keys), torch.bool)
    expected = [
        [sees(documents, anchors, block, window, whole, query, key) for key in range(keys)]
        for query in range(queries)
    ]
    assert found[0, 0].tolist() == expected
    assert found.any(-1).all(), "a slot that sees nothing has no softmax"


def example() -> tuple[torch.Tensor, torch.Tensor, int]:
    documents = torch.tensor([0] * 90 + [1] * 70 + [-1] * 96)
    return documents, torch.tensor([1, 40, 88, 95, 130, 158]), 8


@pytest.mark.parametrize(("window", "whole"), [(None, False), (16, False), (16, True)])
def test_flex_attention_is_given_the_same_mask_and_computes_the_same(monkeypatch, window, whole):
    """The way that CUDA goes, on a CPU: its block mask, and its forward pass against SDPA's."""
    documents, anchors, block = example()
    functions = []
    real = anchor_blocks.create_block_mask

    def recorded(function, *rest, device):
        functions.append(function)
        return real(function, *rest, device="cpu")

    monkeypatch.setattr(anchor_blocks, "create_block_mask", recorded)
    blocks = anchor_blocks.visibility(documents, anchors, block, window, "cuda", whole)
    dense = anchor_blocks.visibility(documents, anchors, block, window, "cpu", whole)
    queries, keys = dense.shape[-2:]
    assert torch.equal(create_mask(functions[0], 1, 1, queries, keys, device="cpu"), dense)

    torch.manual_seed(0)
    q, k, v = torch.randn(2, queries, 16), torch.randn(2, keys, 16), torch.randn(2, keys, 16)
    flex = flex_attention(q[None], k[None], v[None], block_mask=blocks)
    plain = functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=dense)
    torch.testing.assert_close(flex, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("whole", [False, True])
def test_windows_are_wider_than_zlabs_by_the_slot_and_one(zlab_package, whole):
    """Where they differ: speculators counts a window from the anchor, z-lab from the slot itself.

    Slot k of a block sees k + 1 tokens of the context more than z-lab's; the block itself is the same unless
    it is longer than the window. Where all of the context is in z-lab's window, the masks agree.
    """
    from dflash.model import _attention_mask

    anchor, block, window = 20, 4, 6
    documents = torch.zeros(anchor + 9, dtype=torch.long)
    found = anchor_blocks.visibility(
        documents, torch.tensor([anchor]), block, window, "cpu", whole
    )[0, 0]
    ours = torch.cat([found[:, :anchor], found[:, len(documents) :]], dim=1)
    query, key = torch.zeros(block, 1), torch.zeros(anchor + block, 1)
    theirs = _attention_mask(query, key, is_causal=not whole, sliding_window=window)[0, 0]
    assert torch.equal(ours[:, anchor:], theirs[:, anchor:])
    assert not (theirs & ~ours).any()
    for slot in range(block):
        more = (ours & ~theirs)[slot].nonzero().flatten().tolist()
        assert more == list(range(anchor - window, anchor - window + slot + 1))

    wide = anchor + block
    ours = anchor_blocks.visibility(
        torch.zeros(anchor, dtype=torch.long), torch.tensor([anchor - 1]), block, wide, "cpu", whole
    )[0, 0]
    ours = torch.cat([ours[:, : anchor - 1], ours[:, anchor:]], dim=1)
    key = torch.zeros(anchor - 1 + block, 1)
    theirs = _attention_mask(query, key, is_causal=not whole, sliding_window=wide)[0, 0]
    assert torch.equal(ours, theirs)
