"""What a change makes stale: exactly what runs the changed code or follows from it, seen by a dry run."""

import copy
import os

import pytest

from draftmill.driver import code
from draftmill.driver.artefacts import artefacts
from draftmill.driver.config import completed
from draftmill.driver.plan import Plan
from workflow import Run, write_rows
from workflow import rows as data_rows

pytestmark = pytest.mark.slow

# what takes a rule's outputs as inputs (gates excepted: they guard without being inputs)
FOLLOWS = {
    "prepare_target": [
        "generate_responses",
        "tokenize_conversations",
        "extract_hidden_states",
        "build_draft_vocab",
        "import_drafter",
    ],
    "prepare_prompts": ["check_leaks", "generate_responses", "tokenize_conversations"],
    "check_leaks": ["report"],
    "generate_responses": ["tokenize_conversations"],
    "tokenize_conversations": ["extract_hidden_states", "build_draft_vocab"],
    "extract_hidden_states": ["gate_hidden_states", "index_hidden_states"],
    "gate_hidden_states": ["report"],
    "index_hidden_states": [
        "audit_training",
        "train_eagle3",
        "train_dflash",
        "check_drafter",
        "measure_acceptance",
    ],
    "build_draft_vocab": ["audit_training", "train_eagle3", "train_dflash"],
    "audit_training": ["report"],
    "train_eagle3": ["check_drafter", "measure_acceptance"],
    "train_dflash": ["check_drafter", "measure_acceptance"],
    "import_drafter": ["check_drafter", "measure_acceptance"],
    "check_drafter": ["report"],
    "measure_acceptance": ["plot"],
    "plot": ["report"],
    "report": [],
}
EVERYTHING = set(FOLLOWS)
TRAINS = ["train_eagle3", "train_dflash"]
TRAINING = ["audit_training", *TRAINS]  # what follows from a training follows from them
READS_DRAFTERS = ["check_drafter", "measure_acceptance"]
READS_SHARDS = ["gate_hidden_states", "index_hidden_states", *TRAINS, *READS_DRAFTERS]
PREPARES_TARGET = ["prepare_target"]  # everything that reads the target follows from it
LOADS_TARGET = ["generate_responses", "extract_hidden_states", "gate_hidden_states"]
PASSES = ["extract_hidden_states", "gate_hidden_states"]

# module -> the rules that run it, before what follows from them; written down, not computed
RUN_BY = {
    "__init__": [*EVERYTHING],
    "acceptance": READS_DRAFTERS,
    "algorithms": ["audit_training", "import_drafter", *READS_DRAFTERS],
    "anchor_blocks": ["audit_training", "train_dflash"],
    "atomic": [*EVERYTHING],
    "audit": ["audit_training"],
    "audit_batch": ["audit_training"],
    "audit_checks": ["audit_training"],
    "audit_drafter": ["audit_training"],
    "audit_heads": ["audit_training"],
    "audit_leaks": ["audit_training"],
    "audit_loss": ["audit_training"],
    "audit_packs": ["audit_training"],
    "audit_rig": ["audit_training"],
    "audit_targets": ["audit_training"],
    "audited": ["audit_training"],
    "audited_dflash": ["audit_training"],
    "audited_dflash2": [],
    "audited_dspark": [],
    "audited_eagle3": ["audit_training"],
    "block_drafter": ["audit_training", "train_dflash"],
    "block_drafts": ["audit_training", "train_dflash"],
    "block_targets": ["audit_training", "train_dflash"],
    "capture": ["extract_hidden_states"],
    "causality": ["gate_hidden_states"],
    "checkpoint_files": PREPARES_TARGET,
    "checkpoint_fit": PREPARES_TARGET,
    "checkpoint_names": PREPARES_TARGET,
    "compressed_config": PREPARES_TARGET,
    "conversations": ["prepare_prompts"],
    "devices": [*LOADS_TARGET, *TRAINS, "measure_acceptance"],
    "dflash": ["audit_training", "train_dflash"],
    "dflash2": [],
    "draft_leaks": ["check_drafter"],
    "draft_vocab": ["build_draft_vocab", "import_drafter", "measure_acceptance", "report"],
    "drafter_files": [*TRAINING, "import_drafter"],
    "drafter_layers": TRAINING,
    "drafter_training": TRAINING,
    "drafter_trials": ["check_drafter"],
    "drafter_weights": ["check_drafter"],
    "dspark": [],
    "dtype_policy": PREPARES_TARGET,
    "eagle3": ["audit_training", "train_eagle3"],
    "endpoint": ["generate_responses"],
    "errors": [*EVERYTHING],
    "exported_drafter": TRAINING,
    "foreign_dflash": ["import_drafter"],
    "foreign_drafter": ["import_drafter"],
    "foreign_eagle3": ["import_drafter"],
    "foreign_files": ["import_drafter"],
    "foreign_speculators": ["import_drafter"],
    "fp8_blocks": PREPARES_TARGET,
    "freed_memory": PREPARES_TARGET,
    "fresh_drafts": ["check_drafter"],
    "generation": ["generate_responses"],
    "gguf_checkpoint": PREPARES_TARGET,
    "gguf_tokenizer": PREPARES_TARGET,
    "golden_table": PREPARES_TARGET,
    "greedy_text": ["gate_hidden_states"],
    "initial_layers": ["audit_training", "train_dflash"],
    "input_noise": TRAINING,
    "job_times": ["report"],
    "layer_inputs": ["gate_hidden_states"],
    "layers": ["extract_hidden_states", *TRAINS],
    "length_buckets": ["extract_hidden_states"],
    "loaded_parts": ["gate_hidden_states"],
    "loading_share": PASSES,
    "lockstep": PASSES,
    "mask_token": ["audit_training", "train_dflash"],
    "normed_states": ["check_drafter"],
    "openai_engine": ["generate_responses"],
    "packing": TRAINING,
    "predictions": TRAINING,
    "published": ["report"],
    "raw_rows": ["prepare_prompts"],
    "read_ahead": PASSES,
    "rendering": ["generate_responses", "tokenize_conversations"],
    "repetition": ["measure_acceptance"],
    "report_data": ["report"],
    "rotary": [*TRAINING, "import_drafter"],
    "shard_layout": ["extract_hidden_states", *READS_SHARDS],
    "shard_reader": READS_SHARDS,
    "shard_writer": ["extract_hidden_states"],
    "side_by_side": ["report"],
    "skips": ["prepare_prompts", "generate_responses", "tokenize_conversations"],
    "spill": ["extract_hidden_states"],
    "stage": [*EVERYTHING],
    "state_checks": ["gate_hidden_states"],
    "state_contents": ["gate_hidden_states"],
    "state_dataset": TRAINING,
    "stdlib_prompts": ["prepare_prompts"],
    "tables": ["prepare_prompts", "check_leaks", "generate_responses", "gate_hidden_states"],
    "target_config": PREPARES_TARGET,
    "target_head": PREPARES_TARGET,
    "target_location": PREPARES_TARGET,
    "target_manifest": PREPARES_TARGET,
    "target_model": LOADS_TARGET,
    "target_parts": PREPARES_TARGET,
    "target_passes": PASSES,
    "target_skeleton": PREPARES_TARGET,
    "target_structure": PREPARES_TARGET,
    "target_tokenizer": PREPARES_TARGET,
    "tensor_files": PREPARES_TARGET,
    "tokenizer_checks": PREPARES_TARGET,
    "tokenizer_files": PREPARES_TARGET,
    "trainer": TRAINING,
    "training_figures": ["check_drafter"],
    "training_state": TRAINING,
    "transformers_engine": ["generate_responses"],
    "visible_attention": ["audit_training", "train_dflash"],
    # the driver's own: they decide what is stale and change no result
    "launch": [],
    "driver/__init__": [],
    "driver/artefacts": [],
    "driver/code": [],
    "driver/config": [],
    "driver/default_layers": [],
    "driver/drafter_config": [],
    "driver/drafter_cost": [],
    "driver/drafter_plan": [],
    "driver/drafter_size": [],
    "driver/drafter_source": [],
    "driver/engine": [],
    "driver/estimate": [],
    "driver/estimate_text": [],
    "driver/images": [],
    "driver/job_memory": [],
    "driver/plan": [],
    "driver/provenance": [],
    "driver/refused_algorithms": [],
    "driver/session": [],
    "driver/shard_bytes": [],
    "driver/shard_jobs": [],
    "driver/sources": [],
    "driver/target_description": [],
    "driver/target_jobs": [],
    "driver/target_size": [],
    "driver/target_source": [],
    "driver/token_estimate": [],
    "driver/tokenizer_source": [],
}
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


def with_followers(rules) -> set[str]:
    found, waiting = set(), list(rules)
    while waiting:
        rule = waiting.pop()
        if rule not in found:
            found.add(rule)
            waiting += FOLLOWS[rule]
    return found


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
