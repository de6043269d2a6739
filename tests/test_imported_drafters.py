"""Drafters of others beside those trained here: measured by the same rule, with the same figures."""

import copy
import csv
import json
import shutil
from pathlib import Path

import pytest

from mini_road import MiniRoad, road_of
from workflow import PAIRS, publish, with_block_drafter, with_imported

FIGURES = ("tau_pooled", "tau_pooled_interval", "tau_mean_of_means", "acceptance_per_position")
FIGURES += ("steps", "emitted_tokens", "per_response", "out_of_draft_vocab", "categories")


def imported_only(config: dict) -> dict:
    config = copy.deepcopy(config)
    config["drafters"] = {n: d for n, d in config["drafters"].items() if "path" in d}
    config["sources"] = {"judge": config["sources"]["judge"]}
    return config


def assert_same_figures(acceptance: Path) -> None:
    for name, other in PAIRS.items():
        found = json.loads((acceptance / name / "judge.json").read_text())
        compared = json.loads((acceptance / other / "judge.json").read_text())
        assert {k: compared[k] for k in FIGURES} == {k: found[k] for k in FIGURES}, name
        assert compared["conditions"] == found["conditions"]
        assert found["tau_pooled"] > 1, "some draft is right"
        assert (found["imported"], compared["drafter"]["steps"]) == (None, None)
        dtypes = compared["record"]["dtypes"]
        assert dtypes["drafter weights in evaluation"] == "bfloat16"


@pytest.fixture
def both(config, prepared_target) -> MiniRoad:
    """The tiny road with a drafter of each algorithm, trained, their exports in taken/, and nothing measured."""
    road = road_of(with_block_drafter(config), prepared_target)
    for source in ("learn", "choose", "judge"):
        road.to_states(source)
    for name in PAIRS:
        road.build_draft_vocab(name)
        road.train(name)
    publish(road.root / "drafters", Path("taken"))
    return road


def test_an_export_taken_from_a_folder_has_the_figures_of_the_drafter_trained_here(both, config):
    road = MiniRoad(with_imported(config, "taken"))
    for other in PAIRS.values():
        road.import_drafter(other)
    for at in road.plan.measured():
        road.measure_acceptance(**at)
    assert_same_figures(road.root / "acceptance")
    page = road.report().read_text(encoding="utf-8")
    table = page[page.index("Drafters on judge") : page.index("<h3>Conditions</h3>")]
    for name, other in PAIRS.items():
        taken = json.loads((road.root / f"acceptance/{other}/judge.json").read_text())
        assert f"<td>{name}</td><td>trained here</td>" in table
        assert f"<td>{other}</td><td>imported from taken/{name} (speculators)</td>" in table
        assert f"<code>{taken['fingerprint']}</code>" in table
    assert "<td>dflash</td><td>block of 4: 3 draft tokens</td>\n<td>0, 2</td>" in table
    assert "<td>eagle3</td><td>chain of 3 draft tokens</td>\n<td>0, 2, 3</td>" in table
    jobs = [f"audit_training, {name}" for name in PAIRS]
    jobs += [f"check_drafter, {name}" for name in (*PAIRS, *PAIRS.values())]
    for job in jobs:
        assert f"<td>{job}</td>" in page[page.index("<h2>dtype ledger</h2>") :], "its dtypes"
    files = [f"gates/audit/{name}.json" for name in PAIRS]
    files += [f"gates/drafters/{name}.json" for name in (*PAIRS, *PAIRS.values())]
    for file in files:
        assert f"{file}</td>" in page[page.index("<h2>Provenance</h2>") :], "its fingerprint"
    with open(road.root / "summary.tsv", encoding="utf-8", newline="") as file:
        lines = [row for row in csv.DictReader(file, delimiter="\t") if row["category"] == "all"]
    drafted = {
        row["drafter"]: (row["algorithm"], row["imported"], row["drafting"]) for row in lines
    }
    assert drafted == {
        "small": ("eagle3", "no", "chain"),
        "block": ("dflash", "no", "block"),
        "small-again": ("eagle3", "yes", "chain"),
        "block-again": ("dflash", "yes", "block"),
    }


def test_published_figures_stand_apart_with_their_conditions(both):
    for at in both.plan.measured():
        both.measure_acceptance(**at)
    page = both.report().read_text(encoding="utf-8")
    begin = page.index("<h2>Published, other conditions</h2>")
    measured, apart = page[:begin], page[begin : page.index("<h2>Training</h2>")]
    assert "no figures for this target" in apart
    assert "arXiv" in apart
    assert "arXiv" not in measured
    assert "mean of means</td><td>DFlash, arXiv 2602.06036v2</td>" in apart
    figure = (both.root / "figures/training.svg").read_text()
    for label in ("loss, summed over TTT steps", "loss, weighted mean over a block"):
        assert figure.count(f"<!-- {label} -->") == 1


def test_drafters_of_others_alone_need_no_training_source(both, config):
    """No vocabulary, no metrics and nothing of a source that nothing is trained on."""
    alone = imported_only(with_imported(config, "taken"))
    shutil.rmtree(both.root)
    shutil.rmtree("logs", ignore_errors=True)
    road = MiniRoad(alone)
    road.prepare_target()
    road.to_states("judge")
    for other in PAIRS.values():
        road.import_drafter(other)
        road.measure_acceptance("judge", other)
    page = road.report().read_text(encoding="utf-8")
    assert "No drafter was trained in this run." in page
    assert "does not state the chat template" in page
    made = {part for p in road.root.rglob("*") for part in p.relative_to(road.root).parts}
    assert {"judge", "block-again"} < made
    assert not made & {"draft_vocab", "metrics.parquet", "learn", "choose"}


def test_a_capture_of_an_imported_drafter_alone_holds_no_training_source(both, config):
    mixed = with_imported(config, "taken")
    mixed["hidden_states"]["captures"]["other"] = {"output_of": [0, 2]}
    mixed["drafters"]["block-again"]["capture"] = "other"
    plan = MiniRoad(mixed).plan
    assert plan.captured() == [
        *(("low", source) for source in ("learn", "choose", "judge")),
        ("other", "judge"),
    ]


@pytest.mark.slow
def test_the_workflow_measures_trained_and_imported_drafters_side_by_side(four_drafters):
    assert_same_figures(four_drafters.result("acceptance"))
    for name, other in PAIRS.items():
        found, taken = (
            four_drafters.result(f"drafters/{n}/model.safetensors") for n in (name, other)
        )
        assert found.read_bytes() == taken.read_bytes()
    page = four_drafters.result("report.html").read_text(encoding="utf-8")
    rules = ("audit_training", "train_eagle3", "train_dflash", "import_drafter", "check_drafter")
    for rule in rules:
        assert f"<td>{rule}</td>" in page, "timings of every rule"
    assert four_drafters.leftovers() == []


@pytest.mark.slow
def test_the_workflow_measures_drafters_of_others_alone(four_drafters, tmp_path):
    run = four_drafters.copy(tmp_path / "run")
    run.write_config(imported_only(run.config))
    for gone in ("prompts/learn", "tokens/learn", "hidden_states/low/learn", "drafters/small"):
        shutil.rmtree(run.result(gone))
    shutil.rmtree(run.result("draft_vocab"))
    shutil.rmtree(run.result("drafters/block-again"))
    assert run.stale() == {
        "check_leaks": 1,
        "import_drafter": 1,
        "check_drafter": 1,
        "measure_acceptance": 1,
        "plot": 1,
        "report": 1,
    }
    run.snakemake()
    page = run.result("report.html").read_text(encoding="utf-8")
    assert "No drafter was trained in this run." in page
    assert "trained here" not in page
    assert run.stale() == {}


@pytest.mark.slow
def test_another_file_of_an_imported_drafter_takes_it_over_again(four_drafters, tmp_path):
    run = four_drafters.copy(tmp_path / "run")
    (run.folder / "data/taken/block/README.md").write_text("Read on.")
    assert run.stale() == {}
    run.edit("data/taken/block/config.json", "{", "{ ")
    assert run.stale() == {
        "import_drafter": 1,
        "check_drafter": 1,
        "measure_acceptance": 1,
        "plot": 1,
        "report": 1,
    }
    assert "drafters/block-again/run.json" in run.stale_files()
