"""What is no answer to the prompt that was sent is refused, or is a malformed row."""

import pytest

from asked_endpoint import END, answers, refusal
from draftmill import tables
from fake_endpoint import FakeEndpoint, completion, failure, serving
from mini_road import write_data
from workflow import rows

TOO_LONG = "This model's maximum context length is 64 tokens. However, you requested 99 tokens"


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
