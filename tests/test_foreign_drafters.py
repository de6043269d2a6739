"""A drafter made for another target is refused, even where its fingerprints were forged to match."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from draftmill.atomic import sha256_of
from draftmill.errors import DraftmillError
from mini_road import MiniRoad, write_data
from tiny_target import make_config, make_target
from workflow import rows, tiny_config

OTHERS = {
    "another hidden size": (
        {"hidden_size": 32},
        "hidden size 32, but the run's target tiny has 64",
    ),
    "a larger vocabulary": (
        {"vocab_size": 640},
        "embedded tokens 640, but the run's target tiny has 512",
    ),
    "another name": ({"name": "other"}, "name other, but the run's target tiny has tiny"),
    "another class": (
        {"architectures": ["MistralForCausalLM"]},
        r"architectures \['MistralForCausalLM'\], but the run's target tiny has \['Llama",
    ),
    "other weights": (
        {"seed": 3},
        r"run.json: was made for the target with the fingerprint \w+, but",
    ),
    "more layers": ({"num_hidden_layers": 8}, "made for the target with the fingerprint"),
}


@pytest.fixture
def finished(config) -> MiniRoad:
    return trained(config)


def trained(config: dict) -> MiniRoad:
    road = MiniRoad(config)
    road.prepare_target()
    for source in ("learn", "choose", "judge"):
        road.to_states(source)
    road.build_draft_vocab()
    road.train()
    return road


@pytest.fixture
def drafter_for(tmp_path, monkeypatch) -> Callable[..., Path]:
    """The folder of a drafter that was trained for another tiny target."""

    def make(name: str = "tiny", architectures=None, **changes) -> Path:
        folder = tmp_path / "elsewhere"
        folder.mkdir()
        checkpoint = make_target(folder / name, **changes)
        if architectures:
            path = checkpoint / "config.json"
            found = json.loads(path.read_text()) | {"architectures": architectures}
            path.write_text(json.dumps(found | {"model_type": "mistral"}))
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            write_data(rows(6), rows(3, 500), rows(3, 600))
            return trained(tiny_config(checkpoint)).root.resolve() / "drafters/small"

    return make


def forged(road: MiniRoad, drafter: Path, target: bool = False) -> None:
    """Puts a drafter into a run, its record claiming the fingerprints that the run expects."""
    own, kept = road.root / "drafters/small", road.root / "kept.json"
    if not kept.exists():
        shutil.copy(own / "run.json", kept)
    mine = json.loads(kept.read_text())
    shutil.rmtree(own)
    shutil.copytree(drafter, own)
    run = json.loads((own / "run.json").read_text())
    run["fingerprint"] = mine["fingerprint"]
    run["rendering"] = mine["rendering"]
    if target:
        run["record"]["settings"] = mine["record"]["settings"]
    (own / "run.json").write_text(json.dumps(run))


@pytest.mark.parametrize("case", OTHERS)
def test_a_drafter_of_another_target_is_refused(finished, drafter_for, case):
    changes, sentence = OTHERS[case]
    drafter = drafter_for(**changes)
    forged(finished, drafter)
    with pytest.raises(DraftmillError, match="made for the target with the fingerprint"):
        finished.measure_acceptance("judge")
    forged(finished, drafter, target=not sentence.startswith(("made", "run.json")))
    with pytest.raises(DraftmillError, match=sentence):
        finished.measure_acceptance("judge")
    assert not (finished.root / "acceptance").exists()


def edited(road: MiniRoad, change: Callable[[dict, dict], None]) -> None:
    """Edits the drafter's config and tensors, and run.json's digests with them."""
    folder = road.root / "drafters/small"
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    run = json.loads((folder / "run.json").read_text())
    run["files"] = {name: sha256_of(folder / name) for name in run["files"]}
    (folder / "run.json").write_text(json.dumps(run))


def of_other_layers(config: dict, tensors: dict) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 4]


def of_another_vocabulary(config: dict, tensors: dict) -> None:
    tensors["t2d"] = tensors["t2d"].new_zeros(600).index_fill(0, tensors["t2d"].nonzero()[:, 0], 1)


def without_a_tensor(config: dict, tensors: dict) -> None:
    del tensors["fc.weight"]


def of_a_smaller_draft_vocabulary(config: dict, tensors: dict) -> None:
    config["draft_vocab_size"] = 100


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (of_other_layers, r"layers .* \[1, 2, 4\], but the run's target tiny has \[1, 3, 4\]"),
        (of_another_vocabulary, "does not fit its config.json|vocabulary 600"),
        (without_a_tensor, r"model.safetensors: does not fit its config.json \(fc.weight"),
        (of_a_smaller_draft_vocabulary, "model.safetensors: does not fit its config.json"),
    ],
)
def test_a_drafter_that_contradicts_its_target_or_itself_is_refused(finished, change, sentence):
    edited(finished, change)
    with pytest.raises(DraftmillError, match=sentence):
        finished.measure_acceptance("judge")


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_config_of_a_drafter_is_named(finished, text):
    (finished.root / "drafters/small/config.json").write_text(text)
    with pytest.raises(DraftmillError, match=r"drafters/small/config\.json: damaged"):
        finished.measure_acceptance("judge")


@pytest.mark.parametrize(
    ("depth", "layers", "sentence"),
    [
        (2, [0, 1], "output_of 1, the target's final layer"),
        (3, [0, 2], "output_of 2, the target's final layer"),
        (6, [0, 5], "output_of 5, the target's final layer"),
        (2, [0, 2], "output_of 2, but the target has 2 decoder layers, 0 to 1"),
        (3, [1, 7], "output_of 7, but the target has 3 decoder layers"),
        (6, [6], "output_of 6, but the target has 6 decoder layers"),
        (6, [1, 1, 3], "(?i)non-unique|twice"),
        (6, [3, 1], "ascending order"),
        (6, [-1, 1], "-1"),
        (6, [], r"\[\]"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_layers_that_a_target_cannot_give_are_refused_at_every_depth(
    tmp_path, monkeypatch, depth, layers, sentence, known
):
    """Where no config.json is at hand while planning, as for a hub target, the stage refuses them."""
    monkeypatch.chdir(tmp_path)
    write_data(rows(2), rows(2, 500), rows(2, 600))
    config = tiny_config(make_target(tmp_path / "target", num_hidden_layers=depth))
    config["hidden_states"]["captures"]["low"]["output_of"] = layers
    assert make_config(num_hidden_layers=depth).num_hidden_layers == depth
    if not known:
        monkeypatch.setattr("draftmill.driver.config.layer_count", lambda target: None)
    with pytest.raises(DraftmillError, match=sentence):
        MiniRoad(config) if known else to_states(config)
    assert not (tmp_path / "results/tiny/hidden_states").exists()


def to_states(config: dict) -> None:
    road = MiniRoad(config)
    road.prepare_target()
    road.to_states("judge")


@pytest.mark.parametrize("depth", [2, 3])
def test_a_shallow_target_gives_what_it_has(tmp_path, monkeypatch, depth):
    monkeypatch.chdir(tmp_path)
    write_data(rows(2), rows(2, 500), rows(2, 600))
    config = tiny_config(make_target(tmp_path / "target", num_hidden_layers=depth))
    config["hidden_states"]["captures"]["low"]["output_of"] = [*range(depth - 1)]
    road = MiniRoad(config)
    road.prepare_target()
    road.to_states("judge")
    assert json.loads(road.gate_hidden_states("judge").read_text())["agreement"] == 1
