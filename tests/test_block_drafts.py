"""What DFlash2 and DSpark would draft: the same as a loop that drafts single blocks."""

import pytest
import torch

from block_models import each_case, loop


@each_case
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_drafts_are_those_of_a_loop_over_single_blocks(model_of, case, steps):
    model = model_of(case)
    sample = model.samples[1]
    with torch.inference_mode():
        found = model.algorithm.drafts(model.drafter, sample, steps, 3)
        for anchor in range(3, len(sample["input_ids"])):
            assert found[anchor - 1].tolist() == loop(model, sample, steps, anchor)
        assert (found[:2] == -1).all()


@each_case
def test_blocks_before_a_length_limit_are_shorter(model_of, case):
    model = model_of(case)
    sample = model.samples[1]
    end = len(sample["input_ids"])
    with torch.inference_mode():
        found = model.algorithm.drafts(model.drafter, sample, 3, 3, end)
        for anchor in (end - 4, end - 3, end - 2):
            steps = min(3, end - 1 - anchor)
            expected = loop(model, sample, steps, anchor) + [-1] * (3 - steps)
            assert found[anchor - 1].tolist() == expected


@each_case
def test_the_text_after_an_anchor_changes_no_draft(model_of, case):
    model = model_of(case)
    sample = dict(model.samples[1])
    found = model.algorithm.drafts(model.drafter, sample, 3)
    ids = sample["input_ids"].clone()
    ids[12:] = ids[12:].flip(0)
    changed = model.algorithm.drafts(model.drafter, sample | {"input_ids": ids}, 3)
    assert torch.equal(found[:11], changed[:11])
    assert not torch.equal(found[11:], changed[11:])


@each_case
def test_a_draft_depends_on_the_drafters_choice_before_it(model_of, case):
    """What the slots would hold after the text's own tokens is another draft in places, though never in the first."""
    model = model_of(case)
    sample = model.samples[1]
    batch = model.batch([sample])
    blocks = model.model.blocks(batch)
    forced = model.model.chosen(blocks, model.model.predictions(blocks)).view(
        len(blocks.anchors), -1
    )
    if model.drafter.d2t is not None:
        forced = forced + model.drafter.d2t[forced]
    steps = forced.shape[1]
    found = model.algorithm.drafts(model.drafter, sample, steps)[blocks.anchors - 1]
    inside = blocks.anchors + steps < len(sample["input_ids"])
    assert torch.equal(found[:, 0], forced[:, 0])
    assert not torch.equal(found[inside], forced[inside])
