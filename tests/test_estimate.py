"""The estimate against the bytes that the stages then write."""

import json
import re
import shutil
import types
from pathlib import Path

import pytest
import transformers
import yaml

import plan
from draftmill import target_passes
from draftmill.driver.estimate_text import bytes_text, text_of
from draftmill.driver.shard_bytes import shard_bytes
from draftmill.driver.target_size import target_size
from draftmill.driver.token_estimate import Assumed, spread
from draftmill.target_manifest import read_manifest
from mini_road import road_of
from planning import HUB, hub_source, planned
from workflow import rows, write_rows

ANSWERS = ["It is blue.", "A longer answer, in two parts. " * 3, "Yes, and " * 7 + "so on."]


def answered(count: int, first: int) -> list[dict]:
    return [r | {"response": ANSWERS[i % 3]} for i, r in enumerate(rows(count, first))]


def state_bytes(road, source: str) -> int:
    return sum(p.stat().st_size for p in road.states(source).parent.glob("*.parquet"))


@pytest.fixture
def given_config(config) -> dict:
    """20 + 5 answered conversations: two shards and a half, and one; the test source is generated."""
    for name, count, first in (("learn", 25, 0), ("choose", 5, 500)):
        write_rows(Path("data") / f"{name}.jsonl", answered(count, first))
        config["sources"][name]["responses"] = "given"
    return config


def test_given_answers_are_estimated_within_five_percent_of_the_bytes_on_disk(
    given_config, prepared_target
):
    before = planned(given_config)["sources"]
    road = road_of(given_config, prepared_target)
    for source in ("learn", "choose"):
        road.to_states(source)
        found = before[source]
        assert found["states"]["low"] == pytest.approx(state_bytes(road, source), rel=0.05)
        assert found["basis"].startswith("given answers, tokenized")
        assert not found["rough"]
    assert before["learn"]["shards"] == 3


def test_generated_answers_are_bounded_first_and_measured_afterwards(config, prepared_target):
    before = planned(config)["sources"]
    road = road_of(config, prepared_target)
    for source in ("learn", "choose", "judge"):
        road.to_states(source)
    after = planned(config)["sources"]
    for source in ("learn", "choose", "judge"):
        written = state_bytes(road, source)
        assert before[source]["basis"].startswith("at most")
        assert before[source]["states"]["low"] >= 0.99 * written
        assert after[source]["basis"] == "measured"
        assert after[source]["states"]["low"] == pytest.approx(written, rel=0.05)
        assert after[source]["tokens"] <= before[source]["tokens"]
        assert after[source]["prompt_tokens"] == before[source]["prompt_tokens"]


def test_tables_of_other_settings_are_not_taken_as_measured(config, prepared_target, changed):
    road = road_of(config, prepared_target)
    road.to_states("learn")
    other = changed(config, "responses.max_new_tokens", 12)
    assert planned(config)["sources"]["learn"]["basis"] == "measured"
    assert planned(other)["sources"]["learn"]["basis"].startswith("at most")


def test_a_large_source_is_sampled_and_scaled(given_config, monkeypatch):
    whole = planned(given_config)["sources"]["learn"]
    monkeypatch.setattr("draftmill.driver.token_estimate.SAMPLE_ROWS", 12)
    sampled = planned(given_config)["sources"]["learn"]
    assert sampled["basis"] == "given answers, tokenized 12 rows"
    assert sampled["tokens"] != whole["tokens"]
    assert sampled["tokens"] == pytest.approx(whole["tokens"], rel=0.2)


def test_rows_that_the_stages_leave_out_for_their_length_count_nothing(given_config, changed):
    given_config["sources"]["learn"]["on_malformed"] = "skip"
    given_config = changed(given_config, "responses.max_new_tokens", 8)
    whole = planned(given_config)["sources"]["learn"]
    short = planned(changed(given_config, "target.max_length", 60))["sources"]["learn"]
    assert 0 < short["samples"] < whole["samples"]
    assert short["tokens"] <= 60 * short["samples"]


def test_a_data_set_that_is_not_here_is_assumed_with_the_assumption_stated(config):
    config["sources"]["learn"] = hub_source(role="train", responses="given")
    config["sources"]["choose"] = hub_source(role="validation")
    found = planned(config, assumed=Assumed(100, 200))["sources"]
    assert found["learn"]["tokens"] == 1000 * 300
    assert found["choose"]["tokens"] == 1000 * (100 + 24), "an answer ends at max_new_tokens"
    assert found["learn"]["basis"] == "assumed 100 + 200 a row (rows not at hand)"
    assert found["learn"]["rough"]


def test_an_assumption_ends_at_the_longest_conversation(config, changed):
    config["sources"]["learn"] = hub_source(role="train", responses="given")
    found = planned(changed(config, "target.max_length", 250), assumed=Assumed(100, 200))
    assert found["sources"]["learn"]["tokens"] == 1000 * 250


def test_without_a_tokenizer_the_rows_are_counted_and_their_tokens_assumed(config, tiny_target):
    config["target"] = HUB | {"config": str(tiny_target / "config.json")}
    found = planned(config, assumed=Assumed(10, 20))["sources"]["learn"]
    assert (found["rows"], found["tokens"]) == (6, 180)
    assert "tokenizer not at hand" in found["basis"]


def test_a_state_shard_is_its_payload_and_little_else():
    """The published arithmetic: (layers + 1) x hidden x 2 bytes a token."""
    found = shard_bytes((1, 29, 57), 7168, "bfloat16")
    assert found.per_token == 4 * 7168 * 2 + 4.125
    tokens = 4000
    assert found.total(tokens, 1, 0) == pytest.approx(tokens * 4 * 7168 * 2, rel=0.001)
    assert 0 < found.per_sample < 5000
    assert 0 < found.per_shard < 20000


def test_training_needs_twenty_bytes_a_trained_parameter_and_half_in_bf16(config, changed):
    mixed = planned(config)["memory"]["training"]["small"]
    drafter = planned(config)["drafters"]["small"]
    logits, head = 256 * 3 * 256 * 8, 256 * 64 * 2
    assert mixed == drafter["trained"] * 20 + drafter["frozen"] * 4 + head + logits
    plain = changed(config, "drafters.small.training.precision", "bf16")
    half = planned(plain)["memory"]["training"]["small"]
    assert half == drafter["trained"] * 10 + drafter["frozen"] * 2 + head + logits


@pytest.mark.parametrize(
    ("kind", "heads"),
    [(transformers.MambaConfig, {}), (transformers.BloomConfig, {"n_head": 4})],
    ids=["mamba", "bloom"],
)
def test_targets_without_attention_heads_or_a_longest_sequence_are_planned(
    config, kind, heads, tmp_path
):
    about = kind(vocab_size=512, hidden_size=64, num_hidden_layers=6, **heads)
    about.save_pretrained(tmp_path / "other")
    assert target_size(about, "bfloat16").context is None
    config["target"] = HUB | {"config": str(tmp_path / "other" / "config.json")}
    assert planned(config)["drafters"]["small"]["trained"] > 0


def test_a_target_without_a_longest_sequence_is_planned(config, monkeypatch):
    monkeypatch.setattr("draftmill.driver.target_size.context_length", lambda text: None)
    config["sources"]["learn"] = hub_source(role="train", responses="given")
    found = planned(config, assumed=Assumed(10000, 20000))
    assert found["target"]["context"] is None
    assert found["sources"]["learn"]["tokens"] == 1000 * 30000
    assert found["sources"]["choose"]["basis"].startswith("at most")
    assert re.search(r"^context +unknown", text_of(found), re.M)
    json.dumps(found, allow_nan=False)


def test_rows_are_counted_with_the_tokenizer_that_another_repository_has(
    config, tiny_target, monkeypatch, tmp_path
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target, ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    elsewhere = {"hub": "a/tokenizer", "revision": "2" * 40}
    config["target"] |= {"path": str(target), "tokenizer": elsewhere}
    found = planned(config)["sources"]["learn"]
    assert "tokenizer not at hand" in found["basis"]
    snapshot = tmp_path / "cache" / "models--a--tokenizer" / "snapshots" / ("2" * 40)
    shutil.copytree(tiny_target, snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    found = planned(config)["sources"]["learn"]
    assert found["basis"] == "at most, tokenized 6 rows"


def test_the_free_memory_from_which_auto_is_resident_is_that_of_the_stages(
    config, prepared_target, monkeypatch
):
    limit = planned(config)["memory"]["auto is resident from"]
    manifest = read_manifest(prepared_target / "manifest.json")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for free, backend in ((limit + 2, "resident"), (limit - 2, "streamed")):
        machine = types.SimpleNamespace(available=free)
        monkeypatch.setattr("psutil.virtual_memory", lambda machine=machine: machine)
        assert target_passes.choose(manifest) == backend


def test_bytes_are_told_in_decimal_units_with_three_figures():
    figures = [0, 999, 1000, 35.2e12, 999.6e6, 12345]
    assert list(map(bytes_text, figures)) == [
        "0 B",
        "999 B",
        "1.00 kB",
        "35.2 TB",
        "1.00 GB",
        "12.3 kB",
    ]


def test_rows_are_sampled_evenly_from_first_to_last():
    assert spread({"00000": (10, 20), "00001": (20, 24)}, 4) == [10, 13, 17, 20]
    assert spread({"00000": (5, 8)}, 3) == [5, 6, 7]


def test_the_command_prints_a_table_for_people_and_json_for_programs(config, monkeypatch, capsys):
    Path("own.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr("sys.argv", ["plan.py", "--configfile", "own.yaml", "--json"])
    plan.main()
    found = json.loads(capsys.readouterr().out)
    assert found["sources"]["learn"]["rows"] == 6
    monkeypatch.setattr("sys.argv", ["plan.py", "--configfile", "own.yaml"])
    plan.main()
    text = capsys.readouterr().out
    assert f"the run takes {bytes_text(found['disk']['total'])} on disk" in text
    assert "eagle3: {output_of: [1, 2]}" in text


@pytest.mark.parametrize(
    ("key", "argument", "sentence"),
    [
        ("runs", "--json", "plan.py: config: unknown key 'runs'"),
        ("run", "--tflops=0", "0 is not above 0"),
        ("run", "--target-config=absent.json", "plan.py: absent.json: does not exist"),
    ],
)
def test_the_command_refuses_with_a_sentence(config, key, argument, sentence, monkeypatch, capsys):
    Path("own.yaml").write_text(yaml.safe_dump(config | {key: "tiny"}))
    monkeypatch.setattr("sys.argv", ["plan.py", "--configfile", "own.yaml", argument])
    with pytest.raises(SystemExit) as stopped:
        plan.main()
    assert stopped.value.code
    assert sentence in f"{stopped.value.code} {capsys.readouterr().err}"
