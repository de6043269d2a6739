"""What a change makes stale: exactly what runs the changed code or follows from it, seen by a dry run."""

import copy
import os

import pytest

from draftmill.driver import code
from draftmill.driver.artefacts import artefacts
from draftmill.driver.config import completed
from draftmill.driver.plan import Plan
from what_follows import EVERYTHING, READS_DRAFTERS, RUN_BY, with_followers
from workflow import Run, write_rows
from workflow import rows as data_rows

pytestmark = pytest.mark.slow

# the plan of every module is tested; that Snakemake follows the plan, on one of each kind
SEEN_BY_SNAKEMAKE = [
    *("__init__", "acceptance", "atomic", "audit_loss", "block_targets", "draft_vocab"),
    *("checkpoint_fit", "conversations", "drafter_trials", "drafter_training", "driver/plan"),
    *("foreign_drafter", "greedy_text", "launch", "lockstep", "raw_rows", "side_by_side"),
    *("state_dataset", "tables", "trainer", "transformers_engine"),
]
CONFIG_CASES = [
    (("acceptance", "draft_tokens"), 2, READS_DRAFTERS),
    (("acceptance", "seed"), 1, ["measure_acceptance"]),
    (("report",), {"title": "Another"}, ["report"]),
    (("leaks",), {"duplicates": "report"}, ["check_leaks"]),
    (("hidden_states", "gate", "rows"), 32, ["gate_hidden_states"]),
    (("hidden_states", "batch_tokens"), 512, ["extract_hidden_states"]),
    (("hidden_states", "keep_states"), True, []),
    (("hidden_states", "captures", "unused"), {"output_of": [1]}, []),
    (
        ("hidden_states", "captures", "low", "output_of"),
        [0, 1, 2, 3],
        ["extract_hidden_states", "import_drafter"],  # a drafter that names no layers has all
    ),
    (("responses", "max_new_tokens"), 20, ["generate_responses"]),
    (("responses", "seed"), 5, []),  # greedy: no seed is used
    (("responses", "truncated"), "skip", ["tokenize_conversations"]),
    (("responses", "openai"), {"base_url": "http://other/v1"}, []),  # another engine's
    (("drafters", "small", "training", "steps"), 11, ["audit_training", "train_eagle3"]),
    (("drafters", "small", "training", "seed"), 1, ["audit_training", "train_eagle3"]),
    (("drafters", "block", "training", "anchors"), 7, ["audit_training", "train_dflash"]),
    (("drafters", "block", "draft_tokens"), 2, READS_DRAFTERS),
    (
        ("target", "chat_template_kwargs"),
        {"x": 1},
        ["generate_responses", "tokenize_conversations"],
    ),
]


@pytest.fixture(scope="module")
def run(four_drafters, tmp_path_factory) -> Run:
    return four_drafters.copy(tmp_path_factory.mktemp("staleness") / "run")


@pytest.fixture
def restored(run):
    """Puts scripts, rules, data and configuration back after a test, time stamps included."""
    files = [p for part in ("scripts", "rules", "data") for p in (run.folder / part).rglob("*")]
    files = [p for p in [*files, run.folder / "config.yaml"] if p.is_file()]
    saved = {path: (path.read_bytes(), path.stat()) for path in files}
    config = copy.deepcopy(run.config)
    yield run
    for path, (content, stat) in saved.items():
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    run.config = config


def append(run: Run, name: str, text: str) -> None:
    path = run.folder / "scripts" / f"{name}.py"
    path.write_text(path.read_text() + text)


def test_a_finished_run_has_nothing_to_do(run):
    assert run.stale() == {}


def test_the_table_of_modules_is_complete(run):
    folder = run.folder / "scripts" / "draftmill"
    modules = {p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.py")}
    assert modules == set(RUN_BY)


@pytest.mark.parametrize("module", sorted(RUN_BY))
def test_a_code_change_in_a_module_changes_the_plan_of_exactly_what_runs_it(
    run, module, monkeypatch
):
    monkeypatch.chdir(run.folder)
    config = completed(run.config)
    before = [(a.rule, a.fingerprint) for a in artefacts(Plan(config))]
    real = code.file_code
    changed = f"draftmill/{module}.py"
    monkeypatch.setattr(code, "file_code", lambda f: real(f) + "'" if f == changed else real(f))
    code.code_of.cache_clear()
    after = [(a.rule, a.fingerprint) for a in artefacts(Plan(config))]
    code.code_of.cache_clear()
    assert {old[0] for old, new in zip(before, after, strict=True) if old != new} == with_followers(
        RUN_BY[module]
    )


@pytest.mark.parametrize("module", SEEN_BY_SNAKEMAKE)
def test_a_code_change_in_a_module_stales_exactly_what_runs_it(restored, module):
    append(restored, f"draftmill/{module}", "\nMUTATION = 1\n")
    assert set(restored.stale()) == with_followers(RUN_BY[module])


@pytest.mark.parametrize("rule", sorted(EVERYTHING))
def test_a_code_change_in_a_script_stales_its_rule_and_what_follows(restored, rule):
    append(restored, rule, "\nMUTATION = 1\n")
    assert set(restored.stale()) == with_followers([rule])


def measured(*drafters: str) -> set[str]:
    return {f"acceptance/{drafter}/judge.json" for drafter in drafters}


def judged(*drafters: str) -> set[str]:
    """What follows from a drafter's files, figures and report excepted."""
    return measured(*drafters) | {f"gates/drafters/{drafter}.json" for drafter in drafters}


def audited(drafter: str) -> set[str]:
    return {f"gates/audit/{drafter}.json"}


def trained(drafter: str) -> set[str]:
    files = ("config.json", "model.safetensors", "metrics.parquet", "run.json")
    return {f"drafters/{drafter}/{name}" for name in files}


REPORT = {"report.html", "summary.tsv"}
SHOWN = {"figures/training.svg", "figures/acceptance.svg"} | REPORT
BLOCK, CHAIN = ("block", "block-again"), ("small", "small-again")
OF_ONE_ALGORITHM = {
    "dflash": audited("block") | trained("block") | judged(*BLOCK),
    "anchor_blocks": audited("block") | trained("block") | judged(*BLOCK),
    "audited_dflash": audited("block"),
    "audited_eagle3": audited("small"),
    "mask_token": audited("block") | trained("block") | judged(*BLOCK),
    "initial_layers": audited("block") | trained("block") | judged(*BLOCK),
    "visible_attention": audited("block") | trained("block") | judged(*BLOCK),
    "eagle3": audited("small") | trained("small") | judged(*CHAIN),
}


@pytest.mark.parametrize("module", OF_ONE_ALGORITHM)
def test_a_change_in_one_algorithms_module_leaves_the_others_drafters_fresh(restored, module):
    append(restored, f"draftmill/{module}", "\nMUTATION = 1\n")
    shown = REPORT if module.startswith("audited_") else SHOWN
    assert restored.stale_files() == OF_ONE_ALGORITHM[module] | shown


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_how_one_format_is_imported_hangs_on_no_other(restored, algorithm):
    append(restored, f"draftmill/foreign_{algorithm}", "\nMUTATION = 1\n")
    name = {"eagle3": "small-again", "dflash": "block-again"}[algorithm]
    files = trained(name) - {f"drafters/{name}/metrics.parquet"}
    assert restored.stale_files() == files | judged(name) | SHOWN


def test_a_code_change_under_a_restored_old_mtime_is_noticed(restored):
    path = restored.folder / "scripts/draftmill/acceptance.py"
    stat = path.stat()
    append(restored, "draftmill/acceptance", "\nMUTATION = 1\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert set(restored.stale()) == with_followers(READS_DRAFTERS)


def test_comments_everywhere_rebuild_nothing(restored):
    for path in (restored.folder / "scripts").rglob("*.py"):
        path.write_text("# a comment\n" + path.read_text() + "\n# another\n")
    for path in (restored.folder / "rules").rglob("*.smk"):
        path.write_text(path.read_text() + "\n# a comment\n")
    assert restored.stale() == {}


def test_docstrings_everywhere_rebuild_nothing(restored):
    for path in (restored.folder / "scripts").rglob("*.py"):
        text = path.read_text()
        assert text.startswith('"""')
        path.write_text('"""Another docstring. ' + text[3:])
    assert restored.stale() == {}


def test_touching_everything_rebuilds_nothing(restored):
    for part in ("scripts", "rules", "data", "resources"):
        for path in (restored.folder / part).rglob("*"):
            os.utime(path)
    assert restored.stale() == {}


@pytest.mark.parametrize(("keys", "value", "rules"), CONFIG_CASES, ids=lambda v: str(v)[:40])
def test_a_config_change_stales_exactly_what_reads_the_key(restored, keys, value, rules):
    config = copy.deepcopy(restored.config)
    section = config
    for key in keys[:-1]:
        section = section.setdefault(key, {})
    section[keys[-1]] = value
    restored.write_config(config)
    assert set(restored.stale()) == with_followers(rules)


def test_the_order_of_keys_does_not_matter(restored):
    config = copy.deepcopy(restored.config)
    training = config["drafters"]["small"]["training"]
    config["drafters"]["small"]["training"] = dict(reversed(training.items()))
    restored.write_config(dict(reversed(config.items())))
    assert restored.stale() == {}


def test_another_version_of_third_party_code_stales_everything(restored):
    restored.edit("envs/requirements.lock", "pyarrow==", "pyarrow== ")
    stale = set(restored.stale())
    restored.edit("envs/requirements.lock", "pyarrow== ", "pyarrow==")
    assert stale == EVERYTHING


def test_appended_rows_stale_only_the_last_shard_and_what_reads_the_source(restored):
    write_rows(restored.folder / "data/learn.jsonl", data_rows(21))
    stale = restored.stale()
    assert stale["prepare_prompts"] == stale["generate_responses"] == 1
    assert stale["extract_hidden_states"] == stale["gate_hidden_states"] == 1
    assert stale["train_eagle3"] == stale["train_dflash"] == 1


def test_a_row_appended_to_a_large_file_stales_only_its_last_shard(finished_run, tmp_path):
    """Above 1 MB Snakemake goes by time stamps: the source must be ancient to it."""
    run = finished_run.copy(tmp_path / "run")
    long = [row | {"note": "x" * 5000} for row in data_rows(1000)]
    write_rows(run.folder / "data/learn.jsonl", long)
    assert (run.folder / "data/learn.jsonl").stat().st_size > 5_000_000
    config = copy.deepcopy(run.config)
    config["sources"]["learn"]["shard_size"] = 300
    run.write_config(config)
    run.snakemake("--until", "prepare_prompts")
    os.utime(run.folder / "data/learn.jsonl")
    assert "prepare_prompts" not in run.stale()
    write_rows(run.folder / "data/learn.jsonl", [*long, data_rows(1, 5000)[0]])
    assert run.stale()["prepare_prompts"] == 1


def test_a_changed_row_stales_its_shard_only(restored):
    restored.edit("data/learn.jsonl", "Number 3:", "Number three:")
    assert restored.stale()["prepare_prompts"] == 1
