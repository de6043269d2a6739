"""Which algorithms a configuration may name, and what it is told of the others."""

import pytest

from draftmill import algorithms
from draftmill.driver import refused_algorithms
from draftmill.driver.config import completed, schema
from draftmill.errors import DraftmillError
from workflow import of_algorithm

BLOCK = {"block_size": 8, "mask_token_id": 3}


def sentence(config: dict) -> str:
    with pytest.raises(DraftmillError) as caught:
        completed(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "reason", "instead"),
    [
        ("peagle", "depends on what is packed beside it", "use eagle3, or dflash"),
        ("mtp", "the target's own multi-token prediction layers", "use eagle3"),
        ("xpress", "no one tau belongs to its files", "use dspark or dflash2"),
    ],
)
def test_an_algorithm_that_cannot_be_measured_is_refused(
    base_config, changed, algorithm, reason, instead
):
    found = sentence(changed(base_config, "drafters.first.algorithm", algorithm))
    assert found.startswith(f"config: 'drafters.first.algorithm' is {algorithm}, which ")
    assert reason in found
    assert instead in found


def test_every_algorithm_of_speculators_is_offered_or_refused():
    from speculators import SpeculatorModelConfig

    known = set(SpeculatorModelConfig.registry) - {"eagle"}
    offered = schema()["$defs"]["drafter"]["properties"]["algorithm"]["enum"]
    assert set(offered) == set(algorithms.NAMES)
    assert known == set(offered) | set(refused_algorithms.REASONS)


def test_an_unknown_algorithm_is_told_which_there_are(base_config, changed):
    found = sentence(changed(base_config, "drafters.first.algorithm", "dflash3"))
    assert "'drafters.first.algorithm' is not valid" in found
    assert all(name in found for name in algorithms.NAMES)


@pytest.mark.parametrize("drafters", [None, [], {"first": None}, {"first": {"algorithm": ["mtp"]}}])
def test_drafters_that_are_none_are_left_to_the_schema(base_config, drafters):
    assert sentence(base_config | {"drafters": drafters}).startswith("config: 'drafters")


@pytest.mark.parametrize(("algorithm", "drafted"), [("dflash", 7), ("dflash2", 7), ("dspark", 8)])
def test_a_block_drafter_is_measured_at_what_its_block_drafts(
    base_config, changed, algorithm, drafted
):
    drafter = {"capture": "low"} | BLOCK | of_algorithm(algorithm)
    config = completed(changed(base_config, "drafters.first", drafter))
    assert config["drafters"]["first"]["draft_tokens"] == drafted
    assert config["drafters"]["first"]["num_layers"] == 5


def test_dflash2_takes_the_whole_vocabulary(base_config, changed):
    drafter = {"capture": "low", "algorithm": "dflash2"} | BLOCK
    config = completed(changed(base_config, "drafters.first", drafter))
    assert config["drafters"]["first"]["draft_vocab_size"] is None
    found = sentence(changed(base_config, "drafters.first", drafter | {"draft_vocab_size": 500}))
    assert found == (
        "config: 'drafters.first.draft_vocab_size' is 500, but dflash2 drafts from the target's whole "
        "vocabulary; leave it out."
    )


@pytest.mark.parametrize("algorithm", ["dflash2", "dspark"])
def test_a_finished_drafter_of_another_kind_is_refused(base_config, changed, algorithm):
    place = {"hub": "owner/name", "revision": "0" * 40}
    drafter = {"capture": "low", "algorithm": algorithm} | place
    found = sentence(changed(base_config, "drafters.first", drafter))
    assert "taken over for eagle3 and dflash only" in found
    assert f"train a {algorithm} drafter here" in found


@pytest.mark.parametrize(
    ("algorithm", "key", "value"),
    [
        ("dflash", "selector_rank", 8),
        ("dflash2", "markov_rank", 8),
        ("dspark", "conv_group_size", 8),
        ("dspark", "training.selector_loss_alpha", 0.5),
        ("dflash2", "training.confidence_head_alpha", 0.5),
    ],
)
def test_a_key_of_another_algorithm_is_refused(base_config, changed, algorithm, key, value):
    drafter = {"capture": "low", "algorithm": algorithm} | BLOCK
    config = changed(base_config, "drafters.first", drafter)
    found = sentence(changed(config, f"drafters.first.{key}", value))
    assert found == f"config: 'drafters.first.{key}' is not known to {algorithm}; leave it out."
