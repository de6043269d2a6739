"""Answers from a server: its ids as they are, requested with nothing left to its defaults."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import reference_loop
from asked_endpoint import END, answers
from draftmill import tables
from fake_endpoint import FakeEndpoint, completion, serving
from mini_road import MiniRoad, road_of


def number_of(body: dict) -> int:
    """Something that differs between the prompts."""
    return sum(i * token for i, token in enumerate(body["prompt"])) % 400 + 50


def test_the_engines_ids_are_kept_exactly_in_the_order_of_the_rows(asked):
    def late_first(body):
        with endpoint.lock:
            place = len(endpoint.bodies)
        time.sleep(0.2 / place)
        return completion(body, [number_of(body), 7, 7, END])

    with serving(FakeEndpoint(late_first)) as endpoint:
        found = answers(asked(endpoint))
    assert [row["row"] for row in found] == [0, 1, 2]
    sent = {str(body["prompt"]): body for body in endpoint.bodies}
    for row in found:
        body = sent[str(row["prompt_ids"])]
        assert row["response_ids"] == [number_of(body), 7, 7, END]
        assert row["finish_reason"] == "stop"


def test_the_table_is_the_one_that_transformers_makes(config):
    """The server runs the tiny target itself, in float32 (bf16 may flip at near ties)."""
    config["target"]["dtype"] = "float32"
    tables_of = {}
    for backend in ("transformers", "openai"):
        config["responses"]["backend"] = backend
        config["responses"]["openai"] = {"base_url": "http://localhost:1/v1"}
        road = MiniRoad(config)
        road.prepare_target()
        checkpoint = json.loads(road.target.read_text())["checkpoint"]
        target = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        lock = threading.Lock()

        def run(body, target=target, lock=lock):
            with lock:  # one thread in torch
                stops, length = set(body["stop_token_ids"]), body["max_tokens"]
                ids = reference_loop.greedy(target, body["prompt"], length, stops)
            return completion(body, ids, "stop" if ids[-1] in stops else "length")

        with serving(FakeEndpoint(run)) as endpoint:
            config["responses"]["openai"]["base_url"] = endpoint.url
            road = MiniRoad(config)
            for source in ("learn", "judge"):
                road.prepare_prompts(source)
                road.generate_responses(source)
                tables_of[backend, source] = answers(road, source)
        assert bool(endpoint.bodies) == (backend == "openai")
    for source in ("learn", "judge"):
        assert tables_of["openai", source] == tables_of["transformers", source]
        assert tables_of["openai", source]


def test_what_follows_takes_the_answers_as_any_others(asked):
    with serving(FakeEndpoint(lambda body: completion(body, [number_of(body), END]))) as endpoint:
        road = asked(endpoint)
    road.tokenize_conversations("judge")
    made = {row["row"]: row for row in answers(road)}
    for row in tables.read(road.table("tokens", "judge")):
        answer = made[row["row"]]
        assert row["input_ids"] == answer["prompt_ids"] + answer["response_ids"]


@pytest.mark.parametrize(
    ("ids", "choice", "expected", "reason"),
    [
        ([9, 8], {}, [9, 8, END], "stop"),
        ([9, 8], {"stop_reason": END}, [9, 8, END], "stop"),
        ([9, 8, END], {}, [9, 8, END], "stop"),
        ([9] * 24, {"finish_reason": "length"}, [9] * 24, "length"),
        ([9, END, 8], {"finish_reason": "length"}, [9, END], "stop"),  # the server knows fewer ends
        ([], {}, [END], "stop"),
        ([9] * 24, {}, [9] * 24, "length"),  # an end beyond the limit is not kept
    ],
)
def test_the_end_token_stands_once_at_the_end_of_a_finished_answer(
    asked, ids, choice, expected, reason
):
    with serving(FakeEndpoint(lambda body: completion(body, ids, **choice))) as endpoint:
        found = answers(asked(endpoint))
    assert [row["response_ids"] for row in found] == [expected] * 3
    assert {row["finish_reason"] for row in found} == {reason}


@pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
def test_of_several_end_tokens_the_one_that_the_engine_names_is_added(
    prepared_target, config, name
):
    def reply(body):
        assert body["stop_token_ids"] == [1, END, 5]
        return completion(body, [9], **{name: 5})

    with serving(FakeEndpoint(reply)) as endpoint:
        config["responses"] |= {"backend": "openai", "openai": {"base_url": endpoint.url}}
        road = road_of(config, prepared_target)
        manifest = json.loads(road.target.read_text())
        road.target.write_text(json.dumps(manifest | {"stop_ids": [1, END, 5]}))
        road.prepare_prompts("judge")
        road.generate_responses("judge")
    assert [row["response_ids"] for row in answers(road)] == [[9, 5]] * 3


def test_a_server_without_token_ids_gives_text_that_is_tokenized_and_counted(asked, capsys):
    def reply(body):
        found = completion(body, [], text="the river<|im_end|>", token_ids=None)
        found[1]["choices"][0]["prompt_token_ids"] = None
        return found

    with serving(FakeEndpoint(reply)) as endpoint:
        road = asked(endpoint)
    record = tables.record_of(road.table("responses", "judge"))
    assert record["retokenized"] == 3
    assert "3 of 3 answers came without token ids" in capsys.readouterr().out
    found = answers(road)
    assert all(row["response_ids"][-1] == END for row in found)
    assert all(row["response_ids"].count(END) == 1 for row in found)
    road.tokenize_conversations("judge")
    assert tables.read(road.table("tokens", "judge"))


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_text_with_more_tokens_here_than_in_the_engine_is_cut_at_the_limit(asked, reason):
    def reply(body):
        return completion(body, [9] * 24, reason, text="river stone " * 40, token_ids=None)

    with serving(FakeEndpoint(reply)) as endpoint:
        road = asked(endpoint)
    found = answers(road)
    assert [len(row["response_ids"]) for row in found] == [24] * 3
    assert {row["finish_reason"] for row in found} == {"length"}


def test_what_a_server_leaves_out_or_adds_changes_nothing(asked):
    def reply(body):
        status, found = completion(body, [9, END], matched_stop=END, logprobs={"tokens": ["a"]})
        return status, found | {"usage": None, "metadata": [1.5]}

    with serving(FakeEndpoint(reply, content_type="text/plain")) as endpoint:
        found = answers(asked(endpoint))
    assert [row["response_ids"] for row in found] == [[9, END]] * 3


def test_the_record_names_engine_and_model_and_holds_no_time(asked):
    made = []
    for pause in (0, 0.05):

        def reply(body, pause=pause):
            time.sleep(pause)
            return completion(body, [9, END])

        with serving(FakeEndpoint(reply)) as endpoint:
            road = asked(endpoint)
        made.append(road.table("responses", "judge").read_bytes())
        record = tables.record_of(road.table("responses", "judge"))
        assert record["engine"] == {"backend": "openai", "model": "tiny"}
        assert record["retokenized"] == 0
        for path in list(Path("results").rglob("responses")) + list(
            Path("results").rglob("target")
        ):
            shutil.rmtree(path)
    assert made[0] == made[1]


def test_a_request_leaves_nothing_to_the_servers_defaults(asked):
    with serving(FakeEndpoint(lambda body: completion(body, [9, END]))) as endpoint:
        found = answers(asked(endpoint, extra_body={"priority": 3, "repetition_penalty": 1.3}))
    assert sorted(body["prompt"] for body in endpoint.bodies) == sorted(
        row["prompt_ids"] for row in found
    )
    for body in endpoint.bodies:
        del body["prompt"]
        assert body == {
            "model": "tiny",
            "max_tokens": 24,
            "temperature": 0.0,
            "top_p": 1.0,
            "n": 1,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,  # a test source is greedy whatever is configured
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "stop_token_ids": [END],
            "priority": 3,
        }


def test_sampled_rows_have_seeds_of_their_own_that_the_configured_one_decides(asked):
    def seeds(seed: int) -> dict[str, int]:
        sampling = {"temperature": 0.8, "top_p": 0.9, "seed": seed}
        with serving(FakeEndpoint(lambda body: completion(body, [9, END]))) as endpoint:
            asked(endpoint, "learn", sampling, extra_body={"top_k": 20})
        assert {(b["temperature"], b["top_p"], b["top_k"]) for b in endpoint.bodies} == {
            (0.8, 0.9, 20)
        }
        return {str(body["prompt"]): body["seed"] for body in endpoint.bodies}

    first = seeds(3)
    assert len(set(first.values())) == len(first) == 6
    assert seeds(3) == first
    assert not set(seeds(4).values()) & set(first.values())


def test_without_extensions_only_the_api_itself_is_used(asked):
    def reply(body):
        return completion(body, [9], text="the river")

    with serving(FakeEndpoint(reply)) as endpoint:
        road = asked(endpoint, extensions=False)
    own = {"model", "prompt", "max_tokens", "temperature", "top_p", "n"}
    assert all(set(body) == own for body in endpoint.bodies)
    assert tables.record_of(road.table("responses", "judge"))["retokenized"] == 3


@pytest.mark.parametrize("bound", [1, 3])
def test_no_more_requests_are_under_way_than_configured(asked, bound):
    def reply(body):
        time.sleep(0.05)
        return completion(body, [9, END])

    with serving(FakeEndpoint(reply)) as endpoint:
        asked(endpoint, "learn", concurrency=bound)
    assert len(endpoint.bodies) == 6
    assert endpoint.most_under_way == bound
