"""One endpoint: its model by name, its failures as sentences, its key nowhere."""

import time
from pathlib import Path

import pytest

from asked_endpoint import END, answers, refusal
from draftmill.errors import DraftmillError
from fake_endpoint import FakeEndpoint, completion, failure, in_turn, serving

KEY = "sk-very-secret-0123456789"


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
@pytest.mark.parametrize("length", [len(KEY), len(KEY) - 1, 9, 6])
def test_no_error_repeats_the_key_or_its_beginning(asked, monkeypatch, capfd, status, length):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    message = f"Bad key: {KEY[:length]}***, {KEY}"
    found = refusal(asked, lambda body: failure(status, message), retries=0)
    assert KEY[:6] not in found + "".join(capfd.readouterr())
    if status in (401, 403):
        assert f"answers {status}: the key in the environment variable OPENAI_API_KEY" in found
    else:
        assert "Bad key: [key]***, [key]" in found


@pytest.mark.parametrize(
    ("reply", "listed"),
    [
        (lambda body: (200, f"<html>{KEY}".encode()), ...),
        (lambda body: (200, b"<html>" + b" " * 40 + f"{KEY[:9]}".encode()), ...),
        (lambda body: completion(body, [9], stop_reason=KEY), ...),
        (lambda body: completion(body, [9], KEY), ...),
        (None, f"<html>{KEY}".encode()),
        (None, {"data": [{"id": KEY}, {"id": "tiny"}]}),
    ],
)
def test_no_refused_response_repeats_the_key(asked, monkeypatch, reply, listed):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    found = refusal(asked, None, FakeEndpoint(reply, listed=listed))
    assert KEY[:6] not in found
    assert "[key]" in found


@pytest.mark.parametrize("key", ["", "abc"])
def test_a_message_without_the_key_stays_as_it_is(asked, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert "no ab here" in refusal(asked, lambda body: failure(400, "no ab here"))


def test_without_its_variable_no_key_is_sent_and_the_variable_is_named(asked, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)  # of another service
    endpoint = FakeEndpoint(lambda body: failure(401, "who?"))
    not_set = pytest.raises(DraftmillError, match="variable SERVER_KEY is not set")
    with serving(endpoint), not_set:
        asked(endpoint, api_key_env="SERVER_KEY")
    assert set(endpoint.authorizations) == {None}


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


HTML = b"<!DOCTYPE html>\n<html><body>Welcome</body></html>"


@pytest.mark.parametrize("content_type", ["application/json", "text/html"])
@pytest.mark.parametrize("wanted", ["tiny", None])
@pytest.mark.parametrize(
    "listed",
    [
        *(HTML, b"\xff\xfe", b"", [], [{"id": "tiny"}], "tiny", None, 5, {}),
        *({"data": value} for value in ("x", None, {}, ["tiny"], [None], [{}], [{"id": 5}])),
    ],
)
def test_a_list_of_models_that_cannot_be_read_ends_with_a_sentence(
    asked, listed, wanted, content_type
):
    endpoint = FakeEndpoint(
        lambda body: completion(body, [9, END]), listed=listed, content_type=content_type
    )
    found = refusal(asked, None, endpoint, model=wanted)
    assert "the list of models: " in found
    assert "cannot be read as a list of models (" in found
    assert not endpoint.bodies


@pytest.mark.parametrize("models", [("tiny", "target"), None])
def test_a_named_model_is_asked_for_where_models_are_listed_and_where_not(asked, models):
    with serving(FakeEndpoint(lambda body: completion(body, [9, END]), models)) as endpoint:
        asked(endpoint, model="target")
    assert {body["model"] for body in endpoint.bodies} == {"target"}


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
