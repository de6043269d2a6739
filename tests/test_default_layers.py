"""The proposed layers: published values, and safe on any depth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.driver.default_layers import dflash_layers, eagle3_layers
from draftmill.errors import DraftmillError
from draftmill.layers import check_layers

DEPTHS = st.integers(2, 200)


def test_dflash_layers_of_64_are_the_published_ones():
    assert dflash_layers(64) == [1, 16, 31, 46, 61]


def test_eagle3_layers_are_speculators_defaults_as_outputs():
    for depth in (30, 32, 36, 61, 64):
        assert [layer + 1 for layer in eagle3_layers(depth)] == [2, depth // 2, depth - 3]


@given(depth=DEPTHS)
def test_eagle3_layers_pass_the_stages_own_check_on_any_depth(depth):
    found = eagle3_layers(depth)
    check_layers(found, depth, "proposed")
    assert 1 <= len(found) == len(set(found)) <= 3


@given(depth=DEPTHS, wanted=st.integers(1, 12))
def test_dflash_layers_pass_the_stages_own_check_on_any_depth(depth, wanted):
    found = dflash_layers(depth, wanted)
    check_layers(found, depth, "proposed")
    assert 1 <= len(found) == len(set(found)) <= wanted


@given(depth=st.integers(12, 200))
def test_on_targets_deep_enough_no_layer_is_lost(depth):
    assert len(eagle3_layers(depth)) == 3
    assert len(dflash_layers(depth)) == 5


@pytest.mark.parametrize("proposed", [eagle3_layers, dflash_layers])
def test_a_target_of_one_layer_is_refused(proposed):
    with pytest.raises(DraftmillError, match="at least 2 layers"):
        proposed(1)
