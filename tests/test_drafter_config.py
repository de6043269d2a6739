"""What a drafter of the configuration may say: no key stands there without an effect."""

import copy
import json

import pytest

import plot
from draftmill import algorithms
from draftmill.driver import drafter_config
from draftmill.driver.config import completed, schema
from draftmill.driver.plan import Plan
from draftmill.errors import DraftmillError

PROPERTIES = schema()["$defs"]["drafter"]["properties"]
TRAINING = PROPERTIES["training"]["properties"]
# a value for each kind of key, valid by the schema
VALUES = {"initial_layers": [0], "loss": "ce", "betas": [0.9, 0.9], "precision": "bf16"}
VALUES |= {
    "position_weights": "dpace",
    "norm_before_fc": True,
    "norm_before_residual": False,
    "ttt_loss_decay": 0.5,
    "markov_head_type": "rnn",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
OTHERS = [
    ((name,), algorithm)
    for name, child in PROPERTIES.items()
    for algorithm in ("eagle3", "dflash")
    if algorithm not in child.get("algorithms", [algorithm])
]
OTHERS += [
    (("training", name), algorithm)
    for name, child in TRAINING.items()
    for algorithm in ("eagle3", "dflash")
    if algorithm not in child.get("algorithms", [algorithm])
]
TRAINED = [name for name, child in PROPERTIES.items() if child.get("trained")]


def value(name: str) -> object:
    return VALUES.get(name, {} if name == "training" else 2)


def refusal(config: dict) -> str:
    with pytest.raises(DraftmillError) as caught:
        completed(config)
    return str(caught.value)


def drafter(config: dict, **settings) -> dict:
    """The configuration with these settings of its drafter."""
    config = copy.deepcopy(config)
    config["drafters"]["first"] |= settings
    return config


@pytest.fixture
def folder(tmp_path):
    """A folder that looks like a DFlash drafter of others to planning."""
    path = tmp_path / "drafter"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"dflash_config": {"block_size": 10}}))
    return path


@pytest.fixture
def evaluated(base_config, folder):
    """A configuration without a drafter that is trained."""
    base_config["sources"] = {"test": base_config["sources"]["test"]}
    return drafter(base_config, path=str(folder), algorithm="dflash")


@pytest.mark.parametrize(("path", "algorithm"), OTHERS)
def test_a_key_of_another_algorithm_is_refused_by_its_path(path, algorithm, base_config):
    *parents, name = path
    settings = {parents[0]: {name: value(name)}} if parents else {name: value(name)}
    found = refusal(drafter(base_config, algorithm=algorithm, **settings))
    assert found.startswith(
        f"config: 'drafters.first.{'.'.join(path)}' is not known to {algorithm}"
    )


def test_both_algorithms_have_keys_of_their_own():
    assert {algorithm for _, algorithm in OTHERS} == {"eagle3", "dflash"}
    assert {len(path) for path, _ in OTHERS} == {1, 2}


@pytest.mark.parametrize("name", TRAINED)
def test_a_key_of_training_is_refused_on_a_drafter_that_is_only_evaluated(name, evaluated):
    found = refusal(drafter(evaluated, **{name: value(name)}))
    assert found.startswith(f"config: 'drafters.first.{name}' is for training")


def test_an_evaluated_drafter_keeps_no_key_of_training(evaluated):
    found = completed(evaluated)["drafters"]["first"]
    assert set(found) == set(PROPERTIES) - set(TRAINED)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"layers": {"output_of": [1, 4]}},
            "names [4], but the capture 'low' stores output_of [1, 2]",
        ),
        (
            {"layers": {"output_of": [2, 1]}},
            "layers.output_of' is [2, 1]; write the layers in ascending",
        ),
        ({"hub": "a/b"}, "'drafters.first.revision' belong together"),
        ({"revision": "a" * 40}, "'drafters.first.revision' belong together"),
        ({"path": "absent"}, "'drafters.first.path' is 'absent', where no config.json is"),
        (
            {"algorithm": "dflash", "initial_layers": [0, 1]},
            "'drafters.first.initial_layers' names 2 layers of the target, but the drafter has 5",
        ),
        (
            {"algorithm": "dflash", "initial_layers": [0, 1], "num_layers": 3},
            "names 2 layers of the target, but the drafter has 3",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_by_their_path(
    settings, sentence, base_config
):
    assert sentence in refusal(drafter(base_config, **settings))


def test_dpace_and_initial_layers_are_taken_where_they_fit(base_config):
    # gamma weighs the slots in validation
    training = {"position_weights": "dpace", "gamma": 5}
    settings = {"algorithm": "dflash", "initial_layers": [0, 1, 2, 3, 4], "training": training}
    assert completed(drafter(base_config, **settings))


def test_a_drafter_comes_from_one_place(evaluated):
    found = refusal(drafter(evaluated, hub="a/b", revision="a" * 40))
    assert "'drafters.first' names path and hub" in found


def test_bf16_training_needs_a_bf16_target(base_config, changed):
    config = drafter(base_config, training={"precision": "bf16"})
    assert completed(config)
    found = refusal(changed(config, "target.dtype", "float32"))
    assert "'drafters.first.training.precision' is bf16" in found


def test_a_block_drafter_from_the_hub_says_how_many_tokens_it_drafts(evaluated):
    config = drafter(evaluated, path=None, hub="a/b", revision="a" * 40)
    assert "'drafters.first.draft_tokens' is not set" in refusal(config)
    found = completed(drafter(config, draft_tokens=15))
    assert found["drafters"]["first"]["draft_tokens"] == 15


def test_a_block_drafter_in_a_folder_is_measured_with_the_block_of_its_files(evaluated, folder):
    assert completed(evaluated)["drafters"]["first"]["draft_tokens"] == 9
    (folder / "config.json").write_text('{"block_size": 16}')
    assert completed(evaluated)["drafters"]["first"]["draft_tokens"] == 15
    (folder / "config.json").write_text("{}")
    assert "config.json names none" in refusal(evaluated)


def test_a_chain_drafter_of_others_drafts_as_many_tokens_as_those_trained_here(evaluated, changed):
    config = changed(drafter(evaluated, algorithm="eagle3"), "acceptance.draft_tokens", 6)
    assert completed(config)["drafters"]["first"]["draft_tokens"] == 6


def test_with_no_drafter_to_train_test_sources_are_enough(evaluated):
    plan = Plan(completed(evaluated))
    assert plan.trained() == []
    assert plan.captured() == [("low", "test")]


@pytest.mark.parametrize("role", ["train", "validation"])
def test_a_source_that_no_drafter_needs_is_refused(role, evaluated):
    evaluated["sources"]["more"] = {"kind": "stdlib", "role": role}
    assert f"'sources.more.role' is {role}, but no drafter is trained" in refusal(evaluated)


def test_a_capture_that_only_evaluated_drafters_read_holds_test_sources_alone(base_config, folder):
    base_config["hidden_states"]["captures"]["wide"] = {"output_of": [0, 1, 2]}
    other = {"algorithm": "dflash", "capture": "wide", "path": str(folder)}
    base_config["drafters"]["other"] = other
    plan = Plan(completed(base_config))
    assert plan.captured() == [
        *(("low", role) for role in ("train", "validation", "test")),
        ("wide", "test"),
    ]
    other["capture"] = "low"
    assert len(Plan(completed(base_config)).captured()) == 3


def test_the_slots_that_draft_nothing_are_those_of_the_algorithms_own_modules():
    modules = {name: algorithms.load(name) for name in algorithms.NAMES}
    blocks = {name: m.FIRST for name, m in modules.items() if m.DRAFTING == "block"}
    assert blocks == drafter_config.UNDRAFTED


def test_every_algorithms_loss_has_a_label_in_the_figure():
    assert set(plot.LOSSES) == set(algorithms.NAMES)
