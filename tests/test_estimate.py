"""The estimate against the bytes that the stages then write."""

import gc
import json
import re
import shutil
import types
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from torch.utils.flop_counter import FlopCounterMode

import plan
from draftmill import target_passes
from draftmill.capture import Capture
from draftmill.driver.config import completed
from draftmill.driver.estimate import Options, estimate
from draftmill.driver.estimate_text import bytes_text, text_of
from draftmill.driver.plan import Plan
from draftmill.driver.shard_bytes import shard_bytes
from draftmill.driver.target_jobs import MOST_SHARDS, ShardLoad, pass_operations
from draftmill.driver.target_size import target_size
from draftmill.driver.token_estimate import Assumed, spread
from draftmill.errors import DraftmillError
from draftmill.length_buckets import batch_tensors
from draftmill.lockstep import Lockstep
from draftmill.target_manifest import read_manifest
from mini_road import road_of
from workflow import rows, write_rows

HUB = {"hub": "a/b", "revision": "0" * 40}
ANSWERS = ["It is blue.", "A longer answer, in two parts. " * 3, "Yes, and " * 7 + "so on."]


def answered(count: int, first: int) -> list[dict]:
    return [r | {"response": ANSWERS[i % 3]} for i, r in enumerate(rows(count, first))]


def planned(config: dict, **options) -> dict:
    given = {"assumed": Assumed()} | options
    return estimate(Plan(completed(config)), Options(**given))


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


def hub_source(**more) -> dict:
    about = {"kind": "hub", "id": "a/b", "revision": "0" * 40, "rows": 1000, "shard_size": 100}
    return about | more


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


def loading_at(config: dict, seconds: float, **options) -> dict:
    """The plan where extraction computes for so many seconds and a job loads for one."""
    fixed = {"checkpoint_gb": 1.0, "read_gb_per_second": 1.0}
    base = planned(config, **fixed, tflops=1.0)["loading"]["rules"]["extract_hidden_states"]
    return planned(config, **fixed, tflops=base["computing"] / seconds, **options)


def test_loading_counts_jobs_and_names_the_smallest_number_of_shards_that_helps(config):
    config["sources"]["learn"] = hub_source(role="train", responses="given")
    # 10 + 1 + 1 jobs of 1 s
    found = loading_at(config, 60)["loading"]["rules"]["extract_hidden_states"]
    assert found["computing"] == pytest.approx(60)
    assert found["share"] == pytest.approx(12 / 72)
    assert found["enough"] == 2, "6 jobs: a job takes shards of several sources"
    again = loading_at(config, 60, shards_per_job=2)
    assert again["loading"]["rules"]["extract_hidden_states"]["share"] == pytest.approx(6 / 66)
    assert "WARNING: extraction above 10%" not in text_of(again)


def test_a_warning_names_the_shards_a_job_that_are_enough_and_too_small_a_disk(config, monkeypatch):
    config["sources"]["learn"] = hub_source(role="train", responses="given")
    full = type("Usage", (), {"free": 10})
    monkeypatch.setattr("draftmill.driver.estimate.shutil.disk_usage", lambda place: full)
    found = loading_at(config, 60)
    text = text_of(found)
    assert "--set-resources extract_hidden_states:shards_per_job=2 (or in a profile" in text
    two = planned(config, shards_per_job=2)["memory"]["streamed"]["extract_hidden_states"]
    assert f"a streamed job takes {bytes_text(two['bytes'])}" in text
    assert found["disk"]["short"] == found["disk"]["total"] - 10
    assert "are missing; lower the sources' limit" in text


def test_the_gate_reads_the_checkpoint_again_for_few_samples_of_each_shard(config, changed):
    config["sources"]["learn"] = hub_source(role="train", responses="given")
    config = changed(config, "hidden_states.gate.rows", 40)  # three samples of a shard
    found = loading_at(config, 600, gate_shards_per_job=4)
    sources, gate = found["sources"], found["loading"]["rules"]["gate_hidden_states"]
    checked = {n: s["operations"] for n, s in operations_by_source(sources, found, 3).items()}
    assert found["operations"]["gate"] == pytest.approx(sum(checked.values()))
    share = found["operations"]["gate"] / found["operations"]["extraction"]
    assert gate["computing"] == pytest.approx(600 * share)
    assert gate["share"] == pytest.approx(3 / (3 + gate["computing"]))
    assert "WARNING: gate above 10%" in text_of(found)
    length = max(s["tokens"] / s["samples"] for s in sources.values())
    held = streamed(found, "gate_hidden_states")
    assert held["states in flight"] == pytest.approx(4 * 3 * length * 2 * 64 * 2)
    assert held["attention masks"] == 0, "its passes are never padded"


def operations_by_source(sources: dict, found: dict, picked: int) -> dict:
    """What `picked` samples of each shard cost, by the formula."""
    layers, made = found["target"]["active_layers"], {}
    for name, source in sources.items():
        length = source["tokens"] / source["samples"]
        samples = min(picked * source["shards"], source["samples"])
        made[name] = {"operations": samples * (2 * length * layers + 2 * 6 * 64 * length**2)}
    return made


def test_no_more_shards_a_job_are_recommended_than_a_command_line_holds(config):
    config["sources"]["learn"] = hub_source(role="train", responses="given", shard_size=1)
    whole = loading_at(config, 20)  # 1002 shards: 501 a job would be enough
    found = whole["loading"]["rules"]["extract_hidden_states"]
    assert found["most"] == MOST_SHARDS == 200
    assert found["enough"] is None
    assert found["best_share"] == pytest.approx(6 / 26)
    assert "even with 200 shards in one job" in text_of(whole)
    assert "extract_hidden_states:shards_per_job=" not in text_of(whole)
    half = loading_at(config, 60)["loading"]["rules"]["extract_hidden_states"]
    assert half["enough"] == 167, "6 jobs"


def test_operations_follow_their_formulas(config):
    config["sources"]["learn"] = hub_source(role="train", responses="given")
    found = planned(config, assumed=Assumed(100, 200))
    target, made, sources = found["target"], found["operations"], found["sources"]
    layers = target["active_layers"]

    def through(tokens: int, samples: int, parameters: float) -> float:
        return 2 * tokens * parameters + samples * 2 * 6 * 64 * (tokens / samples) ** 2

    extraction = sum(through(s["tokens"], s["samples"], layers) for s in sources.values())
    assert made["extraction"] == pytest.approx(extraction)
    whole = [through(s["tokens"], s["samples"], target["active"]) for s in sources.values()]
    assert made["generation"] == pytest.approx(sum(whole[1:])), "learn has its answers"
    drafter = found["drafters"]["small"]["multiplied"]
    assert made["training"] == 3 * 3 * 2 * drafter * 12 * 256
    assert made["acceptance"] == 3 * 2 * drafter * sources["judge"]["tokens"]


def test_training_needs_twenty_bytes_a_trained_parameter_and_half_in_bf16(config, changed):
    mixed = planned(config)["memory"]["training"]["small"]
    drafter = planned(config)["drafters"]["small"]
    logits, head = 256 * 3 * 256 * 8, 256 * 64 * 2
    assert mixed == drafter["trained"] * 20 + drafter["frozen"] * 4 + head + logits
    plain = changed(config, "drafters.small.training.precision", "bf16")
    half = planned(plain)["memory"]["training"]["small"]
    assert half == drafter["trained"] * 10 + drafter["frozen"] * 2 + head + logits


def streamed(found: dict, rule: str = "extract_hidden_states") -> dict:
    return found["memory"]["streamed"][rule]


def test_extraction_needs_the_weights_or_one_layer_of_them_and_what_is_in_flight(config):
    found = planned(config)
    target, held = found["target"], streamed(found)
    parameters = 2 * target["embedding"] + 64 + target["largest_layer"]  # 64: the final norm
    activations = 4096 * (4 * 64 + 2 * 128)
    in_flight = held["states in flight"] + held["attention masks"]
    assert held["bytes"] == pytest.approx(2 * (parameters + activations) + in_flight, abs=2)
    assert found["memory"]["resident extraction"] > 2 * target["total"]


def test_masks_in_flight_are_those_of_padded_batches_up_to_half_a_batch_long(config, changed):
    for length, batch, longest in ((60, 4096, 60), (300, 100, 50)):
        short = changed(config, "target.max_length", length)
        short = changed(short, "hidden_states.batch_tokens", batch)
        found = planned(short, shards_per_job=1000)
        padded = found["sources"]["learn"]["tokens"]  # validation and test are never padded
        assert streamed(found)["attention masks"] == pytest.approx(padded * longest, abs=1)


def test_states_in_flight_are_those_of_all_shards_of_a_job(config):
    for name, role in (("learn", "train"), ("choose", "validation")):
        config["sources"][name] = hub_source(role=role, responses="given")
    one, four = (planned(config, shards_per_job=n) for n in (1, 4))
    for part in ("states in flight", "attention masks"):
        assert streamed(four)[part] == 4 * streamed(one)[part]
    more = streamed(four)["bytes"] - streamed(one)["bytes"]
    assert more == 3 * (streamed(one)["states in flight"] + streamed(one)["attention masks"])
    assert four["disk"]["spilled"] == 4 * one["disk"]["spilled"]
    whole = streamed(planned(config, shards_per_job=1000))["states in flight"]
    tokens = sum(s["tokens"] for s in one["sources"].values())
    assert whole == pytest.approx(2 * tokens * 64 * 2, abs=1)


@pytest.fixture(scope="module")
def wide_model():
    """A Llama whose states outweigh its rotary angles."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=64,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def living() -> dict[int, int]:
    """Storage -> bytes of every tensor in the process."""
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("padded", [False, True])
def test_halted_passes_hold_what_is_estimated(wide_model, padded):
    before, held = living(), []

    def between_layers(index: int) -> None:
        held.append(sum(n for at, n in living().items() if at not in before))

    capture = Capture(wide_model, [0], lambda state: None)
    lockstep = Lockstep(wide_model.model.layers, between_layers, lambda i: None, lambda i: None)
    rows = [[{"input_ids": [5] * (64 - padded * i)} for i in (7, 3, 0)] for _ in range(5)]
    with torch.inference_mode():
        lockstep.run((lambda r=r: capture(*batch_tensors(r, "cpu"))) for r in rows)
    lockstep.close()
    capture.close()
    tokens = 5 * 3 * 64
    size = target_size(wide_model.config, "bfloat16")
    load = ShardLoad(tokens, tokens * 64 if padded else 0, 0.0)
    assert len(held) == 3
    assert max(held) == pytest.approx(load.held(size), rel=0.03)


def test_operations_of_a_pass_are_those_that_torch_counts(wide_model, monkeypatch):
    length, samples = 256, 2
    size = target_size(wide_model.config, "bfloat16")
    monkeypatch.setattr(
        wide_model.config, "_attn_implementation", "eager"
    )  # counted on every device
    counter = FlopCounterMode(display=False)
    with torch.inference_mode(), counter:
        wide_model.model(torch.ones(samples, length, dtype=torch.long), use_cache=False)
    by_kind = counter.get_flop_counts()["Global"]
    attention = by_kind[torch.ops.aten.bmm]  # weights are multiplied by aten.mm
    # half of it lies behind the causal mask, and other kernels than this one leave it out
    counted = sum(by_kind.values()) - attention / 2
    assert attention > 0.1 * counted, "or its part would not show"
    assert pass_operations(size, samples * length, samples) == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "heads"),
    [(transformers.MambaConfig, {}), (transformers.BloomConfig, {"n_head": 4})],
    ids=["mamba", "bloom"],
)
def test_a_target_that_no_drafter_can_be_made_for_is_refused_with_a_sentence(
    config, kind, heads, tmp_path
):
    about = kind(vocab_size=512, hidden_size=64, num_hidden_layers=6, **heads)
    about.save_pretrained(tmp_path / "other")
    assert target_size(about, "bfloat16").context is None
    config["target"] = HUB | {"config": str(tmp_path / "other" / "config.json")}
    with pytest.raises(
        DraftmillError, match=f"no EAGLE-3 drafter from model_type '{kind.model_type}'"
    ):
        planned(config)


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
