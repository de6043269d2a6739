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


@pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
@pytest.mark.parametrize("ids", [[9], [9, END]])
def test_an_answer_that_a_token_ended_which_is_no_end_of_the_target_is_refused(asked, name, ids):
    found = refusal(asked, lambda body: completion(body, ids, **{name: 77}))
    assert "row " in found
    assert (
        f"at the token 77, which is no end of the target, where only an end token ({END})" in found
    )


@pytest.mark.parametrize("token", [-1, 512, 10**4000])
def test_ids_that_the_target_does_not_have_are_refused(asked, token):
    found = refusal(asked, lambda body: completion(body, [9, token, END]))
    assert "row " in found
    assert f"token id {token}, but the target has 512 tokens: another model" in found


def test_more_ids_than_were_asked_for_are_refused(asked):
    found = refusal(asked, lambda body: completion(body, [9] * 500, "length"))
    assert "row " in found
    assert "answers with 500 token ids where max_tokens: 24 was sent" in found


HTML = b"<!DOCTYPE html>\n<html><body>Welcome</body></html>"


@pytest.mark.parametrize("content_type", ["application/json", "text/html"])
@pytest.mark.parametrize(
    ("value", "found"),
    [
        (HTML, "Invalid JSON"),
        (b'{"choices": [{"text": "\xff\xfe"}]}', "Invalid JSON"),
        (b'{"choices": [', "Invalid JSON"),
        (b"[" * 100_000, "Invalid JSON"),
        (b'{"choices": [{"token_ids": [' + b"9" * 5000 + b"]}]}", "Invalid JSON"),
        (b"", "Invalid JSON"),
        (None, "an object"),
        ([], "an object"),
        ("hello", "an object"),
        ({"hello": "world"}, "choices: Field required"),
        ({"error": {"message": "no engine"}}, "choices: Field required"),
        ({"choices": None}, "choices: Input should be a valid array"),
        ({"choices": {}}, "choices: Input should be a valid array"),
        ({"choices": "text"}, "choices: Input should be a valid array"),
        ({"choices": []}, "choices: List should have at least 1 item"),
        ({"choices": [None]}, "choices.0: Input should be an object"),
    ],
)
def test_a_response_that_is_no_completion_is_refused(asked, value, found, content_type):
    endpoint = FakeEndpoint(lambda body: (200, value), content_type=content_type)
    sentence = refusal(asked, None, endpoint)
    assert "row " in sentence
    assert "cannot be read as a completion" in sentence
    assert found in sentence
    assert "responses.openai.base_url must be the root" in sentence


@pytest.mark.parametrize(
    ("choice", "place"),
    [
        ({"token_ids": [1.0, 5.5, END]}, "token_ids.0: Input should be a valid integer"),
        ({"token_ids": [9, 5.0, END]}, "token_ids.1: Input should be a valid integer"),
        ({"token_ids": ["9", END]}, "token_ids.0: Input should be a valid integer"),
        ({"token_ids": [9, None]}, "token_ids.1: Input should be a valid integer"),
        ({"token_ids": [True, END]}, "token_ids.0: Input should be a valid integer"),
        ({"token_ids": [[9, END]]}, "token_ids.0: Input should be a valid integer"),
        ({"token_ids": "9 2"}, "token_ids: Input should be a valid array"),
        ({"token_ids": {"0": 9}}, "token_ids: Input should be a valid array"),
        ({"token_ids": 9}, "token_ids: Input should be a valid array"),
        ({"token_ids": None, "text": None}, "choices.0: Neither text nor token_ids"),
        ({"token_ids": None, "text": ["a"]}, "text: Input should be a valid string"),
        ({"prompt_token_ids": 5}, "prompt_token_ids: Input should be a valid array"),
        ({"prompt_token_ids": ["5"]}, "prompt_token_ids.0: Input should be a valid integer"),
        ({"finish_reason": {"type": "stop"}}, "finish_reason: Input should be a valid string"),
        ({"stop_reason": 2.0}, "stop_reason.int: Input should be a valid integer"),
        ({"stop_reason": True}, "stop_reason.int: Input should be a valid integer"),
        ({"index": 1}, "index: Input should be 0"),
    ],
)
def test_a_choice_with_a_value_of_another_kind_is_refused_and_not_converted(asked, choice, place):
    found = refusal(asked, lambda body: completion(body, [9, END], **choice))
    assert "row " in found
    assert "cannot be read as a completion (choices.0" in found
    assert place in found


def test_an_answer_of_the_chat_api_is_refused(asked):
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
    found = refusal(asked, lambda body: (200, {"choices": [choice]}))
    assert "choices.0: Neither text nor token_ids" in found


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_more_than_the_one_choice_that_was_asked_for_is_refused(asked, order):
    def reply(body):
        status, found = completion(body, [9, END])
        (choice,) = found["choices"]
        return status, found | {"choices": [choice | {"index": index} for index in order]}

    found = refusal(asked, reply)
    assert "row " in found
    assert "cannot be read as a completion (choices" in found


@pytest.mark.parametrize("usage", [5, {"prompt_tokens": "9"}, {"completion_tokens": -1}])
def test_a_usage_that_counts_nothing_is_refused(asked, usage):
    def reply(body):
        status, found = completion(body, [9, END])
        return status, found | {"usage": usage}

    assert "cannot be read as a completion (usage" in refusal(asked, reply)


def long_rows_refused(body):
    return failure(400, TOO_LONG) if len(body["prompt"]) > 100 else completion(body, [9, END])


def test_an_answer_that_the_servers_context_cut_is_a_malformed_row(asked):
    found = refusal(asked, lambda body: completion(body, [9, 8, 7], "length"))
    assert "row " in found
    assert "ended the answer after 3 of 24 tokens" in found


@pytest.mark.parametrize(
    ("ids", "choice"), [([9, 8], {}), ([], {}), ([], {"text": "", "token_ids": None})]
)
def test_a_cut_answer_is_seen_where_the_server_counts_nothing(asked, ids, choice):
    def reply(body):
        status, found = completion(body, ids, "length", **choice)
        return status, found | {"usage": None}

    assert f"ended the answer after {len(ids)} of 24 tokens" in refusal(asked, reply)


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
