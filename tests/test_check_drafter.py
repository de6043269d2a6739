"""The gate on an exported drafter: a sound one passes, every planted fault is named before tau is measured."""

import json
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import check_drafter
from draftmill import algorithms, drafter_trials, drafter_weights, training_figures
from draftmill.atomic import sha256_of
from draftmill.errors import DraftmillError
from draftmill.state_dataset import StateDataset
from draftmill.tensor_files import read as read_tensors
from mini_road import MiniRoad, write_data
from tiny_target import make_target
from workflow import rows, tiny_config, with_block_drafter

TEXTS = 8  # trained on and checked on, so that a tiny drafter is often right
OVERFITTED = {"tokens_per_batch": 512, "learning_rate": 0.01, "max_grad_norm": 10.0}
STEPS = {"small": {"steps": 80}, "block": {"steps": 200, "anchors": 24}}
ALGORITHMS = {"small": "eagle3", "block": "dflash"}
DRAFTERS = pytest.mark.parametrize("drafter", ["small", "block"])


def overfitting(target: Path, layers: list[int] | None = None) -> dict:
    config = with_block_drafter(tiny_config(target))
    for name, more in STEPS.items():
        training = config["drafters"][name]["training"]
        training |= OVERFITTED | more | {"validate_every": more["steps"]}
    if layers:
        config["hidden_states"]["captures"]["low"]["output_of"] = layers
        config["drafters"]["block"]["layers"] = {"output_of": [layers[0], layers[1]]}
    return config


def to_training(config: dict) -> MiniRoad:
    write_data(rows(TEXTS, 600), rows(TEXTS, 600), rows(TEXTS, 600))
    road = MiniRoad(config)
    road.prepare_target()
    for source in ("learn", "choose", "judge"):
        road.to_states(source)
    for drafter in STEPS:
        road.build_draft_vocab(drafter)
    return road


@pytest.fixture(scope="module")
def trained(tiny_target, tmp_path_factory) -> Path:
    """The folder of a run with an overfitted drafter of each algorithm, and the gate passed by both."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        road = to_training(overfitting(tiny_target))
        for drafter in STEPS:
            road.train(drafter)
            road.check_drafter(drafter)
    return folder


@pytest.fixture
def whole_road(trained, tiny_target, tmp_path, monkeypatch) -> MiniRoad:
    """A copy of that run, to plant a fault in."""
    shutil.copytree(trained, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    return MiniRoad(overfitting(tiny_target))


@pytest.fixture
def road(whole_road, monkeypatch) -> MiniRoad:
    """The same without the seconds that a fresh process takes to start: the drafter is loaded anew in this one."""

    @contextmanager
    def loaded_anew(algorithm: str, folder: Path, samples: list[dict], steps: int):
        module = algorithms.load(algorithm)
        yield lambda: [
            module.drafts(module.load(folder, "cpu"), sample, steps) for sample in samples
        ]

    monkeypatch.setattr(check_drafter, "fresh_drafts", loaded_anew)
    return whole_road


def refused(road: MiniRoad, drafter: str) -> str:
    """The sentence that stops the run; nothing is left for tau to go on."""
    output = road.root / f"gates/drafters/{drafter}.json"
    output.unlink()
    with pytest.raises(DraftmillError) as caught:
        road.check_drafter(drafter)
    assert not output.exists()
    return str(caught.value)


def planted(road: MiniRoad, drafter: str, change: Callable[[dict], None]) -> None:
    """Changes tensors of an exported drafter, and the digests in run.json with them."""
    folder = road.root / "drafters" / drafter
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    rerecorded(folder)


def rerecorded(folder: Path, **more) -> None:
    run = json.loads((folder / "run.json").read_text()) | more
    run["files"] = {name: sha256_of(folder / name) for name in run["files"]}
    (folder / "run.json").write_text(json.dumps(run))


def wrapped(monkeypatch, drafter: str, change: Callable) -> None:
    """change: (drafts of the algorithm, model, sample, steps, *rest) -> drafts."""
    algorithm = algorithms.load(ALGORITHMS[drafter])
    real = algorithm.drafts
    monkeypatch.setattr(algorithm, "drafts", lambda *arguments: change(real, *arguments))


def with_states(monkeypatch, change: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Gives the gate other states; change: (aux, index of the sample) -> aux."""
    real = StateDataset.__getitem__

    def read(data: StateDataset, index: int) -> dict:
        sample = real(data, index)
        return sample | {"aux": change(sample["aux"], index)}

    monkeypatch.setattr(StateDataset, "__getitem__", read)


@DRAFTERS
def test_a_sound_drafter_passes_and_its_figures_are_recorded(road, drafter):
    found = json.loads((road.root / f"gates/drafters/{drafter}.json").read_text())
    trials = found["trials"]
    assert found["warnings"] == []
    assert trials["decided"]
    assert trials["answers"] == TEXTS
    assert trials["tau"] > 1.5
    assert max(trials[f"tau_{name}"] for name in ("shuffle", "states", "layers")) < 1.4
    assert found["leaks"]["anchors_that_follow_states"] > 0
    layers = road.plan.config["drafters"][drafter]["layers"]["output_of"]
    assert len(found["fc_norms"]) == len(layers)
    assert found["of_the_target"] == {"embed_tokens.weight": True, "lm_head.weight": True}
    assert found["fresh_process"] == {"answers": 2}
    losses, run = (
        found["losses"],
        json.loads((road.root / f"drafters/{drafter}/run.json").read_text()),
    )
    assert losses["best_validation"] == run["best_validation_loss"] < losses["uniform_guess"]


@DRAFTERS
def test_its_first_drafts_are_right_as_often_as_in_the_training(road, drafter):
    found = json.loads((road.root / f"gates/drafters/{drafter}.json").read_text())["first_draft"]
    metrics = pq.read_table(road.root / f"drafters/{drafter}/metrics.parquet").to_pylist()
    [last] = [row for row in metrics if row["kind"] == "validation"]
    assert found["in_training"] == last["full_acc_0"] > 0.4
    assert found["here"] == pytest.approx(found["in_training"], abs=0.06)


@DRAFTERS
def test_weights_edited_after_training_are_named(road, drafter):
    path = road.root / f"drafters/{drafter}/model.safetensors"
    tensors = load_file(path)
    tensors["fc.weight"][0, 0] += 1
    save_file(tensors, path, {"format": "pt"})
    assert "check: files: " in (sentence := refused(road, drafter))
    assert f"drafters/{drafter}/model.safetensors is not what was written" in sentence


def of_no_number(tensors: dict) -> None:
    tensors["layers.0.mlp.up_proj.weight"][3, 3] = float("nan")


def of_one_value(tensors: dict) -> None:
    tensors["layers.0.self_attn.q_proj.weight"][:] = 0.5


def with_fc_of_zeros(tensors: dict) -> None:
    tensors["fc.weight"][:] = 0


def with_other_head_rows(tensors: dict) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)


WEIGHTS = [
    (of_no_number, "check: weights: layers.0.mlp.up_proj.weight .* is not finite"),
    (of_one_value, "check: weights: layers.0.self_attn.q_proj.weight .* is 0.5 throughout"),
    (with_fc_of_zeros, "check: weights: fc.weight .* is 0 throughout"),
    (with_other_head_rows, "check: target rows: lm_head.weight .* is not the target's own"),
    (lambda tensors: tensors["d2t"].zero_(), "model.safetensors: .*t2d.* d2t|d2t"),
    (lambda tensors: tensors["d2t"].add_(torch.arange(256)), "d2t"),
]


@DRAFTERS
@pytest.mark.parametrize(("change", "sentence"), WEIGHTS)
def test_weights_that_cannot_be_right_are_named(road, drafter, change, sentence):
    planted(road, drafter, change)
    with pytest.raises(DraftmillError, match=sentence):
        road.check_drafter(drafter)


@DRAFTERS
def test_weights_of_another_dtype_are_named(road, drafter):
    def widened(tensors: dict) -> None:
        tensors["norm.weight"] = tensors["norm.weight"].float()

    planted(road, drafter, widened)
    assert "dtype: drafter weights in evaluation (norm.weight) is float32" in refused(road, drafter)


@DRAFTERS
def test_the_embedding_of_another_target_is_named(road, drafter, tmp_path):
    other = load_file(make_target(tmp_path / "other", seed=3) / "model.safetensors")

    def exchanged(tensors: dict) -> None:
        tensors["embed_tokens.weight"] = other["model.embed_tokens.weight"]

    planted(road, drafter, exchanged)
    assert "check: target rows: embed_tokens.weight" in refused(road, drafter)


@DRAFTERS
def test_an_imported_drafter_may_have_a_head_of_its_own_and_has_no_metrics(road, drafter):
    planted(road, drafter, lambda tensors: tensors["lm_head.weight"].mul_(2))
    folder = road.root / "drafters" / drafter
    rerecorded(folder, imported={"path": "elsewhere"})
    (folder / "metrics.parquet").unlink()
    found = json.loads(road.check_drafter(drafter).read_text())
    assert found["of_the_target"] == {"embed_tokens.weight": True, "lm_head.weight": False}
    assert found["losses"] is None
    assert found["first_draft"]["in_training"] is None
    assert found["trials"]["decided"]


# neighbouring layers of the tiny target, whose weights are random, are alike; its EAGLE-3 drafter, which reads
# three of them, hardly minds which, so DFlash stands for both here
def test_layers_in_another_order_than_in_training_are_named(road, monkeypatch):
    with_states(monkeypatch, lambda aux, index: aux.roll(64, -1))
    assert "check: training: " in (sentence := refused(road, "block"))
    assert "another order of layers" in sentence


def test_layers_off_by_one_from_those_in_training_are_named(
    road, tiny_target, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        (tmp_path / "other").mkdir()
        patch.chdir(tmp_path / "other")
        other = to_training(overfitting(tiny_target, [1, 3, 4]))
        manifest = other.states("choose", "manifest.json").resolve()
    layers = [layer + 1 for layer in road.plan.config["drafters"]["block"]["layers"]["output_of"]]
    data = StateDataset([manifest], "bfloat16", layers)
    states = [data[index]["aux"] for index in range(len(data))]
    with_states(monkeypatch, lambda aux, index: states[index])
    assert "check: training: " in (sentence := refused(road, "block"))
    assert "off by one" in sentence


@DRAFTERS
def test_states_after_the_final_norm_are_named(road, drafter, monkeypatch):
    weight = read_tensors(road.head)[0]["norm.weight"]

    def normed(aux: torch.Tensor, index: int) -> torch.Tensor:
        each = aux.view(len(aux), -1, 64).float()
        each = each * torch.rsqrt(each.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (each * weight).flatten(1).to(aux.dtype)

    with_states(monkeypatch, normed)
    assert "check: norm: the states of output_of 0 behind " in refused(road, drafter)


def with_blind_fc(monkeypatch, drafter: str) -> None:
    """Drafters whose fc stays so small that norms pass nothing of it on."""
    algorithm = algorithms.load(ALGORITHMS[drafter])
    real = algorithm.new_drafter

    def made(*arguments) -> nn.Module:
        model = real(*arguments)
        with torch.no_grad():
            model.fc.weight.mul_(1e-12)
        model.fc.weight.requires_grad_(False)
        return model

    monkeypatch.setattr(algorithm, "new_drafter", made)


@DRAFTERS
def test_a_drafter_that_learnt_from_tokens_alone_is_named(road, drafter, monkeypatch):
    with monkeypatch.context() as patch:
        with_blind_fc(patch, drafter)
        road.train(drafter)
    sentence = refused(road, drafter)
    assert "check: shuffle: with the states of other prompts, tau is " in sentence
    assert "expected at most 70%; its drafts follow from the tokens alone" in sentence


@DRAFTERS
@pytest.mark.parametrize("trial", ["states", "layers"])
def test_a_part_that_can_be_taken_away_without_a_loss_is_named(road, drafter, trial, monkeypatch):
    nothing = lambda algorithm, model, texts, steps: [  # noqa: E731
        drafter_trials.drafts(algorithm, model, text, steps) for text in texts
    ]
    kept = drafter_trials.TRIALS[trial]
    monkeypatch.setitem(drafter_trials.TRIALS, trial, (nothing, *kept[1:]))
    sentence = refused(road, drafter)
    assert f"check: {trial}: " in sentence
    assert "100% of what the drafter gains" in sentence


@DRAFTERS
def test_drafts_that_see_the_state_of_their_anchor_are_named(road, drafter, monkeypatch):
    def leaking(real, model, sample, *rest) -> torch.Tensor:
        return real(model, sample | {"aux": sample["aux"].roll(-1, 0)}, *rest)

    wrapped(monkeypatch, drafter, leaking)
    assert "check: leak: a draft changes with the target's state" in refused(road, drafter)


@DRAFTERS
def test_drafts_that_see_the_tokens_they_propose_are_named(road, drafter, monkeypatch):
    def leaking(real, model, sample, *rest) -> torch.Tensor:
        found = real(model, sample, *rest).clone()
        found[:-1, 0] = sample["input_ids"][2:]
        return found

    wrapped(monkeypatch, drafter, leaking)
    assert "check: leak: a draft changes with the tokens after its anchor" in refused(road, drafter)


@DRAFTERS
def test_drafts_that_no_fresh_process_gives_are_named(whole_road, drafter, monkeypatch):
    def patched(real, *arguments) -> torch.Tensor:
        found = real(*arguments).clone()
        found[:, -1] = 7
        return found

    wrapped(monkeypatch, drafter, patched)
    assert "check: fresh process: " in (sentence := refused(whole_road, drafter))
    assert "gives other drafts there" in sentence


def test_a_fresh_process_that_fails_is_named_with_its_reason(road):
    from draftmill.fresh_drafts import fresh_drafts

    sample = {"input_ids": torch.arange(4), "aux": torch.zeros(4, 192)}
    folder = road.root / "drafters/nothing"
    with (
        fresh_drafts("eagle3", folder, [sample], 3) as fresh,
        pytest.raises(DraftmillError, match=r"check: fresh process: .*nothing.*config\.json"),
    ):
        fresh()


def test_a_drafter_that_barely_learnt_is_not_decided_and_says_so(ready_road):
    ready_road.train()
    found = json.loads(ready_road.check_drafter().read_text())
    assert not found["trials"]["decided"]
    assert "shuffle, states and layers are not decided: tau is " in found["warnings"][0]


def test_columns_of_fc_that_a_layer_never_uses_or_that_drown_the_others_are_named():
    drafter = nn.Module()
    drafter.fc = nn.Linear(12, 4, bias=False)
    with torch.no_grad():
        drafter.fc.weight[:] = 1
        drafter.fc.weight[:, :4] = 0
        drafter.fc.weight[:, 8:] = 300
    norms, warnings = drafter_weights.fc_norms(drafter, [1, 14, 26])
    assert norms == [0, 2, 600]
    assert "output_of 1 are zero" in warnings[0]
    assert "output_of 26 are 300 times" in warnings[1]


@pytest.mark.parametrize("loss", [9.0, float("nan")])
def test_a_validation_far_worse_than_a_uniform_guess_is_named(loss):
    figures = training_figures.Figures(0.5, loss, 0.6)
    with pytest.raises(DraftmillError, match="check: held out: the best validation loss of x is"):
        training_figures.check_losses(figures, 5.5, Path("x"))


def test_a_drafter_that_is_worse_than_a_guess_in_training_too_is_a_warning():
    figures = training_figures.Figures(5.4, 5.9, 0.01)
    found, warnings = training_figures.check_losses(figures, 3.9, Path("x"))
    assert found["uniform_guess"] == 3.9
    assert "has hardly been trained" in warnings[0]


def test_metrics_of_another_training_are_named(road):
    rerecorded(road.root / "drafters/small", best_validation_loss=0.1)
    assert "metrics.parquet: damaged" in refused(road, "small")
