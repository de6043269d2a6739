"""Answers from a server: its ids as they are, its failures as sentences, its key nowhere."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import reference_loop
from draftmill import tables
from draftmill.errors import DraftmillError
from fake_endpoint import FakeEndpoint, completion, failure, serving
from mini_road import MiniRoad, road_of, write_data
from workflow import rows

END = 2  # the tiny target's end token
KEY = "sk-very-secret-0123456789"


@pytest.fixture
def asked(config, prepared_target, monkeypatch):
    """(endpoint, settings of responses.openai, source, other settings) -> the road, its answers made."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)

    def ask(endpoint: FakeEndpoint, source: str = "judge", responses=None, **settings) -> MiniRoad:
        section = {"base_url": endpoint.url, "retries": 2} | settings
        config["responses"] |= {"backend": "openai", "openai": section} | (responses or {})
        shutil.rmtree("results", ignore_errors=True)
        road = road_of(config, prepared_target)
        road.prepare_prompts(source)
        road.generate_responses(source)
        return road

    return ask


def answers(road: MiniRoad, source: str = "judge") -> list[dict]:
    return tables.read(road.table("responses", source))


def refusal(asked, reply, **settings) -> str:
    """The sentence with which the job ends; no table is left."""
    with serving(FakeEndpoint(reply)) as endpoint, pytest.raises(DraftmillError) as caught:
        asked(endpoint, **settings)
    assert not list(Path("results/tiny/responses").rglob("*"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def number_of(body: dict) -> int:
    """Something that differs between the prompts."""
    return sum(i * token for i, token in enumerate(body["prompt"])) % 400 + 50


def in_turn(*replies):
    """Every prompt meets these replies in turn, the last one for good."""
    seen: dict[str, int] = {}
    lock = threading.Lock()

    def reply(body: dict):
        with lock:
            turn = seen.get(key := str(body["prompt"]), 0)
            seen[key] = turn + 1
        return replies[min(turn, len(replies) - 1)](body)

    return reply


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
        ([9, 8], {"stop_reason": 5}, [9, 8, END], "stop"),
        ([9, 8, END], {}, [9, 8, END], "stop"),
        ([9] * 24, {"finish_reason": "length"}, [9] * 24, "length"),
        ([9, END, 8], {"finish_reason": "length"}, [9, END], "stop"),  # the server knows fewer ends
        ([], {}, [END], "stop"),
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
            __import__("shutil").rmtree(path)
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


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_failure_is_retried(asked, status):
    busy = in_turn(
        lambda body: failure(status, "busy"),
        lambda body: failure(status, "busy"),
        lambda body: completion(body, [9, END]),
    )
    with serving(FakeEndpoint(busy)) as endpoint:
        found = answers(asked(endpoint))
    assert [row["response_ids"] for row in found] == [[9, END]] * 3
    assert len(endpoint.bodies) == 9


def test_a_lasting_failure_ends_with_a_sentence(asked):
    found = refusal(asked, lambda body: failure(503, "no engine\nis left"))
    assert "judge/00000.parquet: row " in found
    assert "http://127.0.0.1:" in found
    assert "failed in 3 attempts, at last with: no engine is left" in found


def test_a_server_that_is_not_there_ends_with_a_sentence(asked):
    with serving(FakeEndpoint(lambda body: completion(body, [9]))) as endpoint:
        pass
    with pytest.raises(DraftmillError, match=r"127\.0\.0\.1.* failed in 1 attempts"):
        asked(endpoint, retries=0)


def test_an_answer_that_takes_too_long_is_a_failure(asked):
    found = refusal(asked, lambda body: time.sleep(1) or (200, {}), timeout_seconds=0.2, retries=0)
    assert "timed out" in found


def test_the_key_goes_to_the_server_and_nowhere_else(asked, monkeypatch, capfd):
    monkeypatch.setenv("SERVER_KEY", KEY)
    with serving(FakeEndpoint(lambda body: completion(body, [9, END]))) as endpoint:
        asked(endpoint, api_key_env="SERVER_KEY")
    assert set(endpoint.authorizations) == {f"Bearer {KEY}"}
    files = [path for path in Path().rglob("*") if path.is_file()]
    assert [path for path in files if path.suffix == ".parquet"]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in "".join(capfd.readouterr())


@pytest.mark.parametrize("status", [400, 401, 403, 500])
def test_no_error_repeats_the_key(asked, monkeypatch, status):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    found = refusal(asked, lambda body: failure(status, f"Bad key: {KEY}, {KEY[:9]}***"))
    assert KEY not in found
    if status in (401, 403):
        assert f"answers {status}: the key in the environment variable OPENAI_API_KEY" in found
        assert KEY[:9] not in found


def test_without_its_variable_no_key_is_sent_and_the_variable_is_named(asked, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)  # of another service
    endpoint = FakeEndpoint(lambda body: failure(401, "who?"))
    not_set = pytest.raises(DraftmillError, match="variable SERVER_KEY is not set")
    with serving(endpoint), not_set:
        asked(endpoint, api_key_env="SERVER_KEY")
    assert set(endpoint.authorizations) == {None}


@pytest.mark.parametrize("bound", [1, 3])
def test_no_more_requests_are_under_way_than_configured(asked, bound):
    def reply(body):
        time.sleep(0.05)
        return completion(body, [9, END])

    with serving(FakeEndpoint(reply)) as endpoint:
        asked(endpoint, "learn", concurrency=bound)
    assert len(endpoint.bodies) == 6
    assert endpoint.most_under_way == bound


@pytest.mark.parametrize(
    ("models", "wanted", "expected"),
    [
        (("tiny", "other"), "target", "serves tiny, other, but 'target' is asked for"),
        (("tiny", "other"), None, "serves tiny, other, but no model is named"),
        ((), None, "lists no models, but no model is named"),
        (None, None, "lists no models, but no model is named"),
    ],
)
def test_a_model_that_is_not_served_is_named_beside_those_that_are(asked, models, wanted, expected):
    endpoint = FakeEndpoint(lambda body: completion(body, [9, END]), models)
    with serving(endpoint), pytest.raises(DraftmillError) as caught:
        asked(endpoint, model=wanted)
    assert expected in str(caught.value)
    assert not endpoint.bodies


@pytest.mark.parametrize("models", [("tiny", "target"), None])
def test_a_named_model_is_asked_for_where_models_are_listed_and_where_not(asked, models):
    with serving(FakeEndpoint(lambda body: completion(body, [9, END]), models)) as endpoint:
        asked(endpoint, model="target")
    assert {body["model"] for body in endpoint.bodies} == {"target"}


def other_prompt(body):
    return completion(body, [9, END], prompt_token_ids=[1, *body["prompt"]])


def other_order(body):
    return completion(body, [9, END], prompt_token_ids=body["prompt"][::-1])


def other_count(body):
    status, found = completion(body | {"return_token_ids": False}, [9, END])
    found["usage"]["prompt_tokens"] += 1
    return status, found


@pytest.mark.parametrize("reply", [other_prompt, other_order, other_count])
def test_an_answer_to_another_prompt_than_was_sent_is_refused(asked, reply):
    found = refusal(asked, reply)
    assert "answered a prompt of " in found
    assert "row " in found


@pytest.mark.parametrize("reason", ["content_filter", "tool_calls", "abort", None])
def test_an_answer_that_something_else_ended_is_refused(asked, reason):
    assert repr(reason) in refusal(asked, lambda body: completion(body, [9], reason))


def test_an_answer_that_a_stop_string_ended_is_refused(asked):
    found = refusal(asked, lambda body: completion(body, [9], stop_reason="\n\n"))
    assert r"at the stop string '\n\n'" in found


def test_ids_that_the_target_does_not_have_are_refused(asked):
    found = refusal(asked, lambda body: completion(body, [9, 512, END]))
    assert "token id 512, but the target has 512 tokens: another model" in found


def test_a_response_that_is_no_completion_is_refused(asked):
    assert "without a choice" in refusal(asked, lambda body: (200, {"hello": "world"}))


TOO_LONG = "This model's maximum context length is 64 tokens. However, you requested 99 tokens"


def long_rows_refused(body):
    return failure(400, TOO_LONG) if len(body["prompt"]) > 100 else completion(body, [9, END])


def test_an_answer_that_the_servers_context_cut_is_a_malformed_row(asked):
    found = refusal(asked, lambda body: completion(body, [9, 8, 7], "length"))
    assert "row " in found
    assert "ended the answer after 3 of 24 tokens" in found


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_prompt_beyond_the_servers_context_is_a_malformed_row(asked, config, policy):
    write_data(rows(6), rows(3, 500), [*rows(3, 600), {"prompt": "river stone " * 40}])
    config["sources"]["judge"]["on_malformed"] = policy
    if policy == "stop":
        found = refusal(asked, long_rows_refused)
        assert "row 4: " in found
        assert "refuses its length: This model's maximum context length is 64 tokens" in found
        return
    with serving(FakeEndpoint(long_rows_refused)) as endpoint:
        road = asked(endpoint)
    assert [row["row"] for row in answers(road)] == [0, 1, 2]
    (reason,) = tables.record_of(road.table("responses", "judge"))["skipped"]
    assert "row 4: " in reason


def test_a_refused_field_is_named_with_the_key_that_switches_it_off(asked):
    def strict(body):
        return failure(400, "Unrecognized request argument supplied: return_token_ids")

    with serving(FakeEndpoint(strict)) as endpoint, pytest.raises(DraftmillError) as caught:
        asked(endpoint, concurrency=1)
    assert "'return_token_ids', set responses.openai.extensions: false" in str(caught.value)
    assert len(endpoint.bodies) == 1  # a request that can never succeed is not sent again


def test_a_refused_field_of_an_open_schema_is_found_in_its_list_of_errors(asked):
    detail = [{"type": "extra_forbidden", "loc": ["body", "min_p"], "msg": "Extra inputs"}]
    found = refusal(asked, lambda body: (422, {"detail": detail}))
    assert "answers 422" in found
    assert "'min_p', set responses.openai.extensions: false" in found
