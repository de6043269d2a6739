"""A training that was interrupted ends with the bytes of one that was not, whatever its algorithm."""

import json

import pytest

from draftmill import training_state
from mini_road import MiniRoad
from workflow import with_block_drafter

FILES = ("model.safetensors", "config.json", "metrics.parquet", "run.json")
DRAFTERS = {"eagle3": "small", "dflash": "block"}


class Interrupted(Exception):
    pass


def interrupt_after(monkeypatch, saves: int) -> None:
    """Raises at the `saves`-th resume state, after it is written."""
    real, count = training_state.save, [0]

    def save(*arguments) -> None:
        real(*arguments)
        count[0] += 1
        if count[0] == saves:
            raise Interrupted

    monkeypatch.setattr(training_state, "save", save)


@pytest.fixture
def road(ready_road, config):
    """(algorithm, noise) -> a road that is ready to train its drafter."""

    def ready(algorithm: str, noise: float = 0.0) -> MiniRoad:
        with_block_drafter(config)
        for drafter in config["drafters"].values():
            drafter["training"]["noise"] = noise
        found = MiniRoad(config)
        found.build_draft_vocab(DRAFTERS[algorithm])
        return found

    return ready


@pytest.mark.parametrize(("noise", "points"), [(0.0, [3]), (0.1, [1, 5])])
@pytest.mark.parametrize("algorithm", DRAFTERS)
def test_a_resumed_training_ends_with_the_same_bytes(road, monkeypatch, algorithm, noise, points):
    found, drafter = road(algorithm, noise), DRAFTERS[algorithm]
    folder = found.train(drafter)
    expected = {name: (folder / name).read_bytes() for name in FILES}
    for saves in points:
        with monkeypatch.context() as patched:
            interrupt_after(patched, saves)
            with pytest.raises(Interrupted):
                found.train(drafter)
        assert len(list((found.root / ".resume").iterdir())) == 1
        found.train(drafter)
        for name, content in expected.items():
            assert (folder / name).read_bytes() == content, (name, saves)
        assert list((found.root / ".resume").iterdir()) == []


@pytest.mark.parametrize("algorithm", DRAFTERS)
def test_noise_changes_what_is_trained(road, algorithm):
    drafter = DRAFTERS[algorithm]
    quiet = (road(algorithm).train(drafter) / "model.safetensors").read_bytes()
    noisy = (road(algorithm, 0.1).train(drafter) / "model.safetensors").read_bytes()
    assert quiet != noisy


@pytest.mark.parametrize("algorithm", DRAFTERS)
def test_a_damaged_resume_state_starts_anew(road, monkeypatch, algorithm):
    found, drafter = road(algorithm), DRAFTERS[algorithm]
    folder = found.train(drafter)
    expected = (folder / "model.safetensors").read_bytes()
    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        with pytest.raises(Interrupted):
            found.train(drafter)
    [state] = (found.root / ".resume").iterdir()
    state.write_bytes(state.read_bytes()[:1000])
    found.train(drafter)
    assert (folder / "model.safetensors").read_bytes() == expected


def test_an_interrupted_training_of_one_algorithm_leaves_that_of_the_other_alone(road, monkeypatch):
    found = road("eagle3")
    found.build_draft_vocab("block")
    with monkeypatch.context() as patched:
        interrupt_after(patched, 1)
        with pytest.raises(Interrupted):
            found.train("small")
    folder = found.train("block")
    assert json.loads((folder / "run.json").read_text())["algorithm"] == "dflash"
    assert len(list((found.root / ".resume").iterdir())) == 1
