"""Acceptance: against a simulation of speculative decoding, token by token, and known figures."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftmill import acceptance
from draftmill.acceptance import Walk
from draftmill.repetition import repeated_share

SETTINGS = {"bootstrap": 400, "seed": 0, "draft_tokens": 3}


def simulate(ids: list[int], start: int, drafts: list[list[int]], depth: int) -> Walk:
    """A server that has the prompt, and a target that would say the rest of `ids` and then stop."""
    said, emitted, accepted = ids[: start + 1], [], []  # the prefill says the first token
    while len(said) < len(ids):
        proposals = drafts[len(said) - 2][:depth]  # row j: after token j + 1
        before, right = len(said), 0
        for proposal in proposals:
            if len(said) == len(ids) or ids[len(said)] != proposal:
                break
            said.append(proposal)
            right += 1
        if len(said) < len(ids):
            said.append(ids[len(said)])  # the target's own token of this step
        emitted.append(len(said) - before)
        accepted.append(right)
    assert said == ids
    return Walk(emitted, accepted)


@st.composite
def texts(draw):
    """ids, start, drafts and depth, over so few tokens that drafts are often right."""
    ids = draw(st.lists(st.integers(0, 2), min_size=2, max_size=24))
    start = draw(st.integers(1, len(ids) - 1))
    depth, extra = draw(st.integers(1, 6)), draw(st.integers(0, 2))
    row = st.lists(st.integers(0, 2), min_size=depth + extra, max_size=depth + extra)
    drafts = draw(st.lists(row, min_size=len(ids) - 1, max_size=len(ids) - 1))
    for j in draw(st.sets(st.integers(0, len(ids) - 2))):  # rows that are right to some depth
        right = ids[j + 2 : j + 2 + draw(st.integers(0, depth))]
        drafts[j][: len(right)] = right
    return ids, start, drafts, depth


@given(texts())
def test_every_step_is_that_of_a_simulated_server(case):
    ids, start, drafts, depth = case
    assert acceptance.walk(ids, start, torch.tensor(drafts), depth) == simulate(*case)


@given(texts())
def test_the_steps_emit_every_token_after_the_prefill_once(case):
    ids, start, drafts, depth = case
    found = acceptance.walk(ids, start, torch.tensor(drafts), depth)
    assert sum(found.emitted) == len(ids) - start - 1
    assert all(1 <= tokens <= depth + 1 for tokens in found.emitted)
    assert all(0 <= right <= depth for right in found.accepted)
    assert (acceptance.pooled_tau([found]) or 1) >= 1


def right_drafts(ids: list[int], depth: int) -> torch.Tensor:
    padded = ids + [-1] * depth
    return torch.tensor([padded[j + 2 : j + 2 + depth] for j in range(len(ids) - 1)])


def test_drafts_that_are_all_right_emit_depth_plus_one_a_step():
    ids = list(range(3 + 1 + 5 * 4))
    found = acceptance.walk(ids, 3, right_drafts(ids, 4), 4)
    assert found == Walk([5] * 4, [4] * 4)
    assert acceptance.pooled_tau([found]) == 5


def test_drafts_that_are_all_wrong_emit_one_a_step():
    ids = list(range(12))
    found = acceptance.walk(ids, 3, torch.full((11, 4), 99), 4)
    assert found == Walk([1] * 8, [0] * 8)
    assert acceptance.pooled_tau([found]) == 1


def test_a_step_is_cut_where_the_text_ends():
    ids = list(range(4 + 7))  # after the prefill's token, seven more: 5 + 2 of 5
    found = acceptance.walk(ids, 3, right_drafts(ids, 4), 4)
    assert found == Walk([5, 2], [4, 2])


def test_a_response_of_one_token_has_no_step():
    assert acceptance.walk([1, 2, 3], 2, torch.zeros(2, 4, dtype=torch.int64), 4) == Walk([], [])


def test_fewer_draft_tokens_use_only_the_first_proposals():
    ids = list(range(3 + 1 + 9))
    assert acceptance.walk(ids, 3, right_drafts(ids, 8), 2) == Walk([3] * 3, [2] * 3)


def test_pooled_and_mean_tau_weigh_responses_differently():
    walks = [Walk([4, 4], [3, 3]), Walk([1] * 8, [0] * 8), Walk([], [])]
    assert acceptance.pooled_tau(walks) == 16 / 10
    assert acceptance.mean_tau(walks) == (4 + 1) / 2


def test_without_a_step_there_is_no_tau():
    for walks in ([], [Walk([], [])]):
        assert acceptance.pooled_tau(walks) is None
        assert acceptance.mean_tau(walks) is None
        assert acceptance.interval(walks, 100, 0) is None
        assert acceptance.per_position(walks, 2) == [0, 0]


def test_acceptance_per_position_is_the_share_of_all_steps():
    walks = [Walk([4, 1], [3, 0]), Walk([2, 3], [1, 2])]
    assert acceptance.per_position(walks, 4) == [3 / 4, 2 / 4, 1 / 4, 0]


several = st.lists(
    st.lists(st.integers(0, 3), max_size=6).map(lambda a: Walk([k + 1 for k in a], a)), max_size=8
)


@given(several)
def test_uncut_steps_have_a_tau_of_one_plus_the_sum_over_positions(walks):
    shares = acceptance.per_position(walks, 3)
    assert shares == sorted(shares, reverse=True)
    tau = acceptance.pooled_tau(walks)
    assert tau is None or tau == pytest.approx(1 + sum(shares))


@given(several, st.integers(0, 5))
def test_an_interval_is_ordered_repeatable_and_within_the_responses(walks, seed):
    found = acceptance.interval(walks, 100, seed)
    assert found == acceptance.interval(walks, 100, seed)
    means = [sum(w.emitted) / len(w.emitted) for w in walks if w.emitted]
    if means:
        slack = 1e-9
        assert min(means) - slack <= found[0] <= found[1] <= max(means) + slack


def test_the_interval_of_equal_responses_is_their_tau():
    walks = [Walk([3, 2, 1], [2, 1, 0])] * 20
    assert acceptance.interval(walks, 200, 0) == pytest.approx([2, 2])


def test_the_interval_of_like_responses_holds_the_pooled_tau_and_narrows():
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(0, 4, (400, 30), generator=generator).tolist()
    walks = [Walk([k + 1 for k in a], a) for a in steps]
    widths = []
    for count in (25, 400):
        low, high = acceptance.interval(walks[:count], 1000, 0)
        assert low < acceptance.pooled_tau(walks[:count]) < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2
    assert acceptance.interval(walks, 1000, 0) != acceptance.interval(walks, 1000, 1)


def test_a_summary_counts_what_it_was_made_from():
    walks = [Walk([4, 1], [3, 0]), Walk([2], [1]), Walk([], [])]
    found = acceptance.summary(walks, SETTINGS)
    assert (found["responses"], found["steps"], found["emitted_tokens"]) == (3, 3, 7)
    assert found["tau_pooled"] == 7 / 3
    assert found["tau_mean_of_means"] == (2.5 + 2) / 2
    assert len(found["acceptance_per_position"]) == 3


@given(several, st.data())
def test_categories_share_out_all_steps(walks, data):
    names = data.draw(st.lists(st.sampled_from("ab"), min_size=len(walks), max_size=len(walks)))
    found = acceptance.by_category(walks, names, SETTINGS)
    assert set(found) == set(names)
    for key in ("responses", "steps", "emitted_tokens"):
        whole = acceptance.summary(walks, SETTINGS)[key]
        assert sum(group[key] for group in found.values()) == whole


def test_a_response_without_a_category_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        acceptance.by_category([Walk([1], [0])], [], SETTINGS)


@pytest.mark.parametrize(
    ("texts", "n", "share"),
    [
        ([[1, 1, 1, 1]], 1, 3 / 4),
        ([[1, 2, 1, 2, 1]], 2, 2 / 4),
        ([[1, 2, 3, 4]], 2, 0),
        ([[1, 2], [1, 2]], 2, 0),  # equal texts do not repeat themselves
        ([[1, 1], [1, 2, 3, 4]], 1, 1 / 6),
        ([[1, 2], []], 3, None),
        ([], 1, None),
    ],
)
def test_the_repeated_share_counts_ngrams_seen_earlier_in_the_same_text(texts, n, share):
    assert repeated_share(texts, n) == share
