"""Answers of the target: padding never touches evaluated text, seeds decide sampled text."""

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies
from transformers import LlamaForCausalLM

import reference_loop
from draftmill import tables
from draftmill.transformers_engine import batches_of
from mini_road import MiniRoad, road_of

Lengths = strategies.lists(strategies.integers(1, 9), min_size=1, max_size=40)


@given(Lengths, strategies.integers(1, 7), strategies.sampled_from(["none", "left"]))
def test_batches_hold_every_row_once(lengths, size, padding):
    prompts = {row: [0] * length for row, length in enumerate(lengths)}
    batches = list(batches_of(prompts, size, padding))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert max(map(len, batches)) <= size
    if padding == "none":
        assert all(len({lengths[row] for row in batch}) == 1 for batch in batches)


def answers(road: MiniRoad, source: str) -> list[dict]:
    road.prepare_prompts(source)
    road.generate_responses(source)
    return tables.read(road.table("responses", source))


def test_greedy_answers_of_a_test_source_are_those_of_a_plain_loop(
    config,
    prepared_target,
):
    config["target"]["dtype"] = "float32"  # exact: bf16 may flip at near ties
    road = MiniRoad(config)
    road.prepare_target()
    manifest = json.loads(road.target.read_text())
    target = LlamaForCausalLM.from_pretrained(
        Path(manifest["checkpoint"]), dtype=torch.float32
    ).eval()
    for row in answers(road, "judge"):
        expected = reference_loop.greedy(target, row["prompt_ids"], 24, {2})
        assert row["response_ids"] == expected
        assert row["finish_reason"] == ("stop" if expected[-1] == 2 else "length")


@pytest.fixture
def sampled(config) -> dict:
    config = copy.deepcopy(config)
    config["responses"] |= {"temperature": 1.0, "top_p": 0.9, "seed": 3}
    config["sources"]["learn"]["shard_size"] = 3
    return config


def texts(road: MiniRoad, shard: str) -> bytes:
    road.prepare_prompts("learn", shard)
    road.generate_responses("learn", shard)
    return road.table("responses", "learn", shard).read_bytes()


def test_one_seed_gives_the_same_bytes_and_another_does_not(sampled, prepared_target):
    road = road_of(sampled, prepared_target)
    first = texts(road, "00000")
    assert texts(road, "00000") == first
    sampled["responses"]["seed"] = 4
    rows = tables.read(road.table("responses", "learn"))
    other = MiniRoad(sampled)
    texts(other, "00000")
    assert tables.read(other.table("responses", "learn")) != rows


def test_validation_and_test_sources_are_greedy_whatever_the_temperature(sampled):
    settings = json.loads(
        MiniRoad(sampled).plan.settings("generate_responses", source="judge", shard="00000")
    )
    assert settings["config"]["temperature"] == 0
    assert settings["config"]["padding"] == "none"
