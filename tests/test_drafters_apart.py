"""Drafters of one run hang on nothing of each other: neither keys, nor layers, nor how they are measured."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftmill import algorithms
from draftmill.driver import code, drafter_config, session
from draftmill.driver.artefacts import artefacts
from draftmill.driver.config import completed
from draftmill.driver.drafter_plan import BY_ALGORITHM
from draftmill.driver.plan import Plan
from draftmill.errors import DraftmillError
from draftmill.stage import canonical
from workflow import with_block_drafter

MEASURED = {"acceptance/block/judge.json", "gates/drafters/block.json"}
SHOWN = {"figures/training.svg", "report.html"}
TRAINED = {"drafters/block/run.json", "gates/audit/block.json"} | MEASURED | SHOWN
VOCAB = {"draft_vocab/block.safetensors"}


def fingerprints(config: dict) -> dict[str, str]:
    """path below results/RUN -> fingerprint."""
    plan = Plan(completed(config))
    return {a.path.removeprefix(f"{plan.root}/"): a.fingerprint for a in artefacts(plan)}


def differing(before: dict, after: dict) -> set[str]:
    found = fingerprints(before), fingerprints(after)
    names = found[0].keys() | found[1].keys()
    return {name for name in names if found[0].get(name) != found[1].get(name)}


@pytest.fixture
def both(config) -> dict:
    return with_block_drafter(config)


CASES = [
    ("training.anchors", 7, TRAINED),
    ("training.position_weights", "dpace", TRAINED),
    ("training.noise", 0.01, TRAINED),
    ("num_layers", 1, TRAINED),
    ("mask_token_id", 5, TRAINED | VOCAB),
    ("layers", {"output_of": [2, 3]}, TRAINED),
    ("sliding_window", 64, TRAINED),
    ("block_size", 6, TRAINED),
    ("draft_vocab_size", 128, TRAINED | VOCAB),
    ("draft_tokens", 2, MEASURED | SHOWN),
]


@pytest.mark.parametrize(("key", "value", "stale"), CASES, ids=[case[0] for case in CASES])
def test_a_key_of_the_block_drafter_leaves_the_chain_drafter_fresh(
    both, changed, key, value, stale
):
    assert differing(both, changed(both, f"drafters.block.{key}", value)) == stale


def test_draft_tokens_of_a_chain_drafter_only_measure_it_again(both, changed):
    other = changed(both, "drafters.small.draft_tokens", 2)
    measured = {"acceptance/small/judge.json", "gates/drafters/small.json"}
    assert differing(both, other) == measured | SHOWN


def test_adding_or_removing_a_drafter_on_other_layers_of_the_capture_extracts_nothing(both):
    one = copy.deepcopy(both)
    del one["drafters"]["block"]
    assert differing(one, both) == TRAINED | VOCAB
    assert differing(both, one) == TRAINED | VOCAB


def test_a_folder_of_a_drafter_counts_by_what_is_read_of_it(both):
    folder = Path("taken")
    folder.mkdir()
    (folder / "config.json").write_text('{"block_size": 4}')
    section = {"algorithm": "dflash", "capture": "low", "path": "taken"}
    both["drafters"]["other"] = section
    with pytest.raises(DraftmillError, match=r"'drafters\.other\.path': taken holds no weights"):
        fingerprints(both)
    (folder / "model.safetensors").write_bytes(b"1")
    before = fingerprints(both)
    (folder / "README.md").write_text("Read on.")
    assert fingerprints(both) == before
    (folder / "model.safetensors").write_bytes(b"2")
    after = fingerprints(both)
    assert {name for name in after if after[name] != before[name]} == {
        "drafters/other/run.json",
        "acceptance/other/judge.json",
        "gates/drafters/other.json",
        "report.html",
        "figures/training.svg",
    }


def test_the_driver_freezes_every_module_that_a_job_can_take_by_name(repository):
    files = {*algorithms.files(repository / "scripts")}
    for rule, prefixes in BY_ALGORITHM.items():
        taken = drafter_config.FOREIGN if rule == "import_drafter" else algorithms.NAMES
        for prefix in prefixes:
            for algorithm in taken:
                module = algorithms.module_of(algorithm, prefix)
                assert module.replace(".", "/") + ".py" in files


@pytest.mark.parametrize("module", ["draftmill/dflash.py", "draftmill/foreign_eagle3.py"])
def test_a_child_process_refuses_a_module_taken_by_name_that_differs_from_the_drivers(
    both, repository, monkeypatch, module
):
    """The children of a cluster executor read the Snakefile again, perhaps after a change."""
    plan = Plan(completed(both))
    driver = SimpleNamespace(basedir=str(repository), is_main_process=False)
    monkeypatch.setattr(session.shard_jobs, "planned", lambda path: {})
    frozen = session.open_session(driver, plan).frozen
    assert set(frozen["code"][module]) >= {module, "draftmill/errors.py"}
    assert set(frozen["code"][module]) == set(code.closure(module))
    changed = copy.deepcopy(frozen)
    changed["code"][module][module] = "0" * 64
    path = Path(session.plan_file(plan.root))
    path.parent.mkdir(parents=True)
    path.write_text(canonical(frozen))
    session.open_session(driver, plan)
    path.write_text(json.dumps(changed))
    with pytest.raises(DraftmillError, match=f"scripts/{module} or a module of it changed after"):
        session.open_session(driver, plan)
