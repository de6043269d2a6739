"""The plan: a change makes other fingerprints for exactly what follows from it."""

import copy
import json
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest

from draftmill.driver.artefacts import artefacts
from draftmill.driver.config import completed
from draftmill.driver.plan import Plan
from draftmill.stage import Stage


def prompts(name: str, count: int) -> list[dict]:
    return [{"prompt": f"{name} question {i}?"} for i in range(count)]


@pytest.fixture
def config(workplace, write_rows, tiny_target) -> dict:
    """Two drafters on two captures; train with generated and with given answers."""
    write_rows(workplace / "learn.jsonl", prompts("learn", 45))
    write_rows(workplace / "given.jsonl", [p | {"response": "Yes."} for p in prompts("given", 8)])
    write_rows(workplace / "check.jsonl", prompts("check", 6))
    write_rows(workplace / "exam.jsonl", prompts("exam", 6))
    write_rows(workplace / "quiz.jsonl", prompts("quiz", 6))

    def source(name: str, role: str, **settings) -> dict:
        return {"kind": "file", "role": role, "path": f"{name}.jsonl"} | settings

    return {
        "run": "tiny",
        "target": {"path": str(tiny_target)},
        "sources": {
            "learn": source("learn", "train", limit=15, shard_size=10),
            "given": source("given", "train", responses="given"),
            "check": source("check", "validation"),
            "exam": source("exam", "test"),
            "quiz": source("quiz", "test"),
        },
        "hidden_states": {
            "captures": {"low": {"output_of": [1, 2]}, "high": {"output_of": [0, 4]}}
        },
        "drafters": {
            "a": {"algorithm": "eagle3", "capture": "low"},
            "b": {"algorithm": "eagle3", "capture": "high"},
        },
    }


def fingerprints(config: dict) -> dict[str, str]:
    """path below results/RUN -> fingerprint."""
    plan = Plan(completed(config))
    found = {a.path.removeprefix(f"{plan.root}/"): a.fingerprint for a in artefacts(plan)}
    assert len(found) == len(list(artefacts(plan)))
    return found


def differing(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def matching(paths, patterns: str) -> set[str]:
    """The paths that fit one of the patterns; every pattern must fit something."""
    fits = {pattern: {p for p in paths if fnmatch(p, pattern)} for pattern in patterns.split()}
    assert all(fits.values()), fits
    return set().union(*fits.values())


REPORT = " report.html"
RESULTS = " acceptance/* figures/*" + REPORT
TRAINED = " drafters/* gates/audit/* gates/drafters/*" + RESULTS
STATES = " hidden_states/* gates/*/*" + TRAINED
TOKENS = " tokens/* draft_vocab/*" + STATES
GENERATED = "".join(
    f" responses/{s}/* tokens/{s}/* hidden_states/*/{s}/* gates/*/{s}/*"
    for s in ("learn", "check", "exam", "quiz")
)
FROM_GENERATED = GENERATED + " draft_vocab/*" + TRAINED
FROM_CUT = " ".join(p for p in FROM_GENERATED.split() if not p.startswith("responses"))
OF_LEARN = " tokens/learn/* hidden_states/*/learn/* gates/*/learn/* draft_vocab/*" + TRAINED
ALL_OF_LEARN = "prompts/learn/* responses/learn/* gates/leaks.json" + OF_LEARN
OF_GIVEN = OF_LEARN.replace("learn", "given")
OF_EXAM = " hidden_states/*/exam/* gates/*/exam/* acceptance/*/exam.json figures/*" + REPORT
ONLY_A = " acceptance/a/* figures/*" + REPORT
OF_A = " drafters/a/* gates/audit/a.json gates/drafters/a.json" + ONLY_A
ONLY_LOW = " hidden_states/low/* gates/low/*" + OF_A

CHAIN = [
    ("report.title", "Another", REPORT),
    ("run", "other", REPORT),
    ("leaks.duplicates", "report", "gates/leaks.json" + REPORT),
    ("hidden_states.gate.rows", 9, "gates/*/*/*" + REPORT),
    ("hidden_states.gate.min_agreement", 0.5, "gates/*/*/*" + REPORT),
    ("hidden_states.keep_states", False, ""),
    ("hidden_states.batch_tokens", 77, STATES),
    ("hidden_states.captures.low.output_of", [1, 3], ONLY_LOW),
    ("hidden_states.captures.unused", {"output_of": [3]}, ""),
    ("acceptance.draft_tokens", 3, "gates/drafters/*" + RESULTS),
    ("acceptance.bootstrap", 300, RESULTS),
    ("acceptance.repetition_ngram", 3, RESULTS),
    ("acceptance.seed", 3, RESULTS),
    ("drafters.a.training.steps", 3, OF_A),
    ("drafters.a.training.seed", 3, OF_A),
    ("drafters.a.ttt_steps", 3, OF_A),
    ("drafters.a.num_layers", 2, OF_A),
    ("drafters.a.draft_vocab_size", 99, "draft_vocab/a.*" + OF_A),
    ("responses.max_new_tokens", 9, FROM_GENERATED),
    ("responses.batch_size", 9, FROM_GENERATED),
    ("responses.temperature", 0.7, "responses/learn/*" + OF_LEARN),
    ("responses.truncated", "skip", FROM_CUT),
    ("responses.seed", 5, ""),  # greedy: there is nothing to seed
    ("responses.top_p", 0.5, ""),
    ("sources.learn.on_malformed", "skip", ALL_OF_LEARN),
    ("sources.given.on_malformed", "skip", "prompts/given/* gates/leaks.json" + OF_GIVEN),
    ("target.max_length", 999, "responses/*" + TOKENS),
    ("target.chat_template_kwargs", {"thinking": False}, "responses/*" + TOKENS),
    ("target.dtype", "float32", "target/* responses/*" + TOKENS),
    ("target.trust_remote_code", True, "target/* responses/*" + TOKENS),
    ("target.tokenizer.trust_remote_code", True, "target/* responses/*" + TOKENS),
    ("target.tokenizer", {"hub": "a/b", "revision": "a" * 40}, "target/* responses/*" + TOKENS),
]


@pytest.mark.parametrize(("key", "value", "expected"), CHAIN, ids=[row[0] for row in CHAIN])
def test_a_changed_key_changes_exactly_what_follows_from_it(key, value, expected, config, changed):
    before = fingerprints(config)
    after = fingerprints(changed(config, key, value))
    assert differing(before, after) == matching(before, expected)


def test_a_seed_matters_where_answers_are_sampled(config, changed):
    sampled = changed(config, "responses.temperature", 0.7)
    before = fingerprints(sampled)
    for key, value in (("responses.seed", 5), ("responses.top_p", 0.5)):
        after = fingerprints(changed(sampled, key, value))
        assert differing(before, after) == matching(before, "responses/learn/*" + OF_LEARN)


SERVED = {"backend": "openai", "openai": {"base_url": "http://node7:8000/v1"}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("base_url", "http://node8:8000/v1"),
        ("concurrency", 3),
        ("retries", 0),
        ("timeout_seconds", 5),
        ("api_key_env", "ANOTHER_KEY"),
    ],
)
def test_how_a_server_is_reached_changes_nothing_that_is_made(key, value, config, changed):
    config = changed(config, "responses", SERVED)
    other = changed(config, f"responses.openai.{key}", value)
    assert fingerprints(other) == fingerprints(config)
    plans = [Plan(completed(c)) for c in (config, other)]
    assert json.loads(plans[1].engine_options)[key] == value
    assert plans[0].engine_options != plans[1].engine_options
    settings = plans[1].settings("generate_responses", source="learn", shard="00000")
    assert key not in settings
    assert str(value) not in json.dumps(json.loads(settings)["config"]["openai"])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("openai.model", "other", FROM_GENERATED),
        ("openai.extensions", False, FROM_GENERATED),
        ("openai.extra_body", {"top_k": 3}, FROM_GENERATED),
        ("max_new_tokens", 9, FROM_GENERATED),
        ("temperature", 0.7, "responses/learn/*" + OF_LEARN),
        ("backend", "transformers", FROM_GENERATED),
        ("batch_size", 9, ""),
    ],
)
def test_what_a_server_is_asked_changes_what_follows_from_it(key, value, expected, config, changed):
    config = changed(config, "responses", SERVED)
    before, after = (fingerprints(c) for c in (config, changed(config, f"responses.{key}", value)))
    assert differing(before, after) == matching(before, expected)


def test_a_server_that_is_not_used_changes_nothing(config, changed):
    other = changed(config, "responses.openai", {"model": "m", "extra_body": {"a": 1}})
    assert fingerprints(other) == fingerprints(config)


def test_a_higher_limit_keeps_full_shards_and_adds_new_ones(config, changed):
    before = fingerprints(config)
    after = fingerprints(changed(config, "sources.learn.limit", 40))
    kept = {path for path in after if path.endswith(("learn/00000.parquet", "learn/00000.json"))}
    assert len(kept) == 3 + 2 * 2
    assert differing(before, after) == matching(after, ALL_OF_LEARN) - kept
    assert {path for path in after if path.startswith("prompts/learn/")} == {
        f"prompts/learn/{i:05d}.parquet" for i in range(4)
    }


def test_a_changed_row_changes_only_its_shard_and_what_is_made_of_all(config):
    before = fingerprints(config)
    path = Path("learn.jsonl")
    path.write_text(path.read_text().replace("learn question 12?", "learn question XII?"))
    kept = {path for path in before if path.endswith(("learn/00000.parquet", "learn/00000.json"))}
    assert differing(before, fingerprints(config)) == matching(before, ALL_OF_LEARN) - kept


def test_a_changed_test_row_leaves_the_drafters_alone(config):
    before = fingerprints(config)
    path = Path("exam.jsonl")
    path.write_text(path.read_text().replace("exam question 2?", "exam question II?"))
    whole = "prompts/exam/* responses/exam/* tokens/exam/* gates/leaks.json" + OF_EXAM
    assert differing(before, fingerprints(config)) == matching(before, whole)


def test_rows_beyond_the_limit_and_a_new_time_stamp_change_nothing(config):
    before = fingerprints(config)
    with open("learn.jsonl", "a") as file:
        file.write('{"prompt": "one more"}\n')
    os.utime("exam.jsonl", (1, 1))
    assert fingerprints(config) == before


def test_a_further_test_source_trains_nothing_again(config, write_rows):
    before = fingerprints(config)
    write_rows(Path("extra.jsonl"), prompts("extra", 3))
    config["sources"]["extra"] = {"kind": "file", "role": "test", "path": "extra.jsonl"}
    after = fingerprints(config)
    common = differing(before, after) & before.keys()
    assert common == matching(before, "gates/leaks.json figures/*" + REPORT)


def test_a_further_drafter_changes_no_other(config):
    before = fingerprints(config)
    config["drafters"]["c"] = {"algorithm": "eagle3", "capture": "low", "num_layers": 2}
    after = fingerprints(config)
    assert differing(before, after) & before.keys() == matching(before, "figures/*" + REPORT)
    assert {path for path in after if path not in before} == matching(after, "*/c.* */c/*")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_file_of_the_target_changes_all_but_prompts_and_leaks(
    name, config, changed, tmp_path
):
    shutil.copytree(config["target"]["path"], tmp_path / "copy")
    config = changed(config, "target.path", "copy")
    before = fingerprints(config)
    file = tmp_path / "copy" / name
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    assert differing(before, fingerprints(config)) == matching(
        before, "target/* responses/*" + TOKENS
    )


def test_the_order_of_keys_within_a_section_changes_nothing(config):
    def backwards(value):
        if not isinstance(value, dict):
            return value
        return {key: backwards(value[key]) for key in reversed(value)}

    config["drafters"]["a"] |= {"training": {"steps": 3, "seed": 1}, "num_layers": 2}
    shuffled = copy.deepcopy(config)
    for section in ("target", "hidden_states"):
        shuffled[section] = backwards(shuffled[section])
    for section in ("sources", "drafters"):
        shuffled[section] = {k: backwards(v) for k, v in shuffled[section].items()}
    assert fingerprints(shuffled) == fingerprints(config)


def test_writing_a_default_out_changes_nothing(config):
    assert fingerprints(completed(config)) == fingerprints(config)


def test_a_settings_string_gives_the_fingerprint_back(config):
    plan = Plan(completed(config))
    for wildcards in plan.measured():
        text = plan.settings("measure_acceptance", **wildcards)
        stage = Stage.parse(json.dumps(json.loads(text), indent=3))  # however it was passed on
        assert stage.fingerprint == plan.fingerprint("measure_acceptance", **wildcards)
        assert stage.inputs["target"] == plan.fingerprint("prepare_target")
