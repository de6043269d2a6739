"""What jobs that load the target hold and compute, against tensors and operations that torch counts."""

import gc

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from draftmill.capture import Capture
from draftmill.driver.estimate_text import bytes_text, text_of
from draftmill.driver.target_jobs import MOST_SHARDS, ShardLoad, pass_operations
from draftmill.driver.target_size import target_size
from draftmill.driver.token_estimate import Assumed
from draftmill.length_buckets import batch_tensors
from draftmill.lockstep import Lockstep
from planning import hub_source, planned


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


def tensors() -> list[torch.Tensor]:
    """Every tensor in the process that has bytes: what torch traces with has none."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    return [value for value in gc.get_objects() if type(value) in kinds and not value.is_meta]


def living() -> dict[int, int]:
    """Storage -> bytes of every tensor in the process."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors()}


@pytest.mark.parametrize("padded", [False, True])
def test_halted_passes_hold_what_is_estimated(wide_model, padded):
    gc.collect()
    earlier = tensors()  # kept, or their addresses would be given to new ones
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
    assert earlier
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
