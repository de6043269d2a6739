"""Raw rows as conversations: the accepted shapes, the reasons for refusal, and equal prompts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.conversations import MalformedRow, parse, prompt_key

USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "Be brief."}


def read(value: object, responses: str = "generate", number: int = 7):
    row = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse(row, number, responses)


def key(*prompts: str) -> str:
    return prompt_key([{"role": "user", "content": prompt} for prompt in prompts])


def test_a_prompt_row_is_one_user_turn():
    found = read({"prompt": "Why?", "id": "a1", "category": "short"})
    assert (found.id, found.category, found.messages) == ("a1", "short", [USER])


def test_a_row_without_id_and_category_has_its_number_and_all():
    found = read({"prompt": "Why?"}, number=12)
    assert (found.id, found.category) == ("12", "all")


@pytest.mark.parametrize("name", ["id", "question_id", "task_id"])
def test_known_names_of_an_identity_are_kept_as_text(name):
    assert read({"prompt": "Why?", name: 31}).id == "31"


@pytest.mark.parametrize("answer", ["response", "completion"])
def test_a_prompt_with_its_answer_is_given_or_generated_anew(answer):
    row = {"prompt": "Why?", answer: "Because.", "system": "Be brief."}
    assert read(row, "given").messages == [SYSTEM, USER, ANSWER]
    assert read(row, "generate").messages == [SYSTEM, USER]


def test_messages_keep_their_turns_order_and_other_keys():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "now"}]}
    tool = {"role": "tool", "content": "12:00", "tool_call_id": "c1"}
    turns = [SYSTEM, USER, call, tool, ANSWER]
    found = read({"messages": turns}, "given").messages
    assert found == [SYSTEM, USER, call | {"content": ""}, tool, ANSWER]
    assert read({"messages": turns}, "generate").messages == found[:-1]


def test_a_servers_message_keeps_its_reasoning_and_loses_its_empty_fields():
    empty = {"refusal": None, "audio": None, "function_call": None, "tool_calls": []}
    thought = ANSWER | {"reasoning_content": "Hm, why indeed."}
    found = read({"messages": [USER, thought | empty]}, "given").messages
    assert found == [USER, thought | {"tool_calls": []}]


def test_reasoning_without_an_answer_is_no_answer():
    cut = {"role": "assistant", "content": None, "reasoning_content": "Hm, why"}
    with pytest.raises(MalformedRow, match=r"turn 1 \(assistant\) has no text"):
        read({"messages": [USER, cut]}, "given")


def test_sharegpt_conversations_have_the_same_shape():
    turns = [
        ("system", "Be brief."),
        ("human", "Why?"),
        ("function_call", '{"name": "now"}'),
        ("observation", "12:00"),
        ("gpt", "Because."),
    ]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    found = read(row, "given").messages
    assert [m["role"] for m in found] == ["system", "user", "assistant", "tool", "assistant"]
    assert [m["content"] for m in found] == [text for _, text in turns]


def test_generate_drops_every_answer_after_the_last_question():
    assert read({"messages": [USER, ANSWER, USER, ANSWER, ANSWER]}).messages == [USER, ANSWER, USER]


BROKEN = {
    "a blank line": b" \t",
    "not JSON": b'{"prompt": "Why',
    "a JSON list where": [USER],
    "a JSON str where": "Why?",
    "none of the keys": {"text": "Why?"},
    "'messages' is not a list of turns": {"messages": []},
    "'conversations' is not a list of turns": {"conversations": USER},
    "turn 1 is not an object": {"messages": [USER, "Because."]},
    "turn 0 has no known role": {"messages": [{"role": "oracle", "content": "Why?"}]},
    "turn 1 has no known role": {"conversations": [{"from": "human", "value": "a"}, {"from": "x"}]},
    "no user turn": {"messages": [SYSTEM, ANSWER]},
    "turn 0 (user) has no text": {"prompt": 3},
    "an empty user turn": {"prompt": "  \n"},
    "an empty response (turn 1)": {"prompt": "Why?", "response": ""},
}


@pytest.mark.parametrize(("reason", "value"), BROKEN.items(), ids=list(BROKEN))
def test_a_malformed_row_is_refused_with_its_reason(reason, value):
    with pytest.raises(MalformedRow) as caught:
        read(value, "given")
    assert reason in str(caught.value) or "no answer" in str(caught.value)
    if "empty response" not in reason:  # an answer that is to be made anew may be empty
        with pytest.raises(MalformedRow) as caught:
            read(value, "generate")
        assert reason in str(caught.value)


@pytest.mark.parametrize("value", [{"prompt": "Why?"}, {"messages": [USER, ANSWER, USER]}])
def test_given_answers_must_be_there(value):
    with pytest.raises(MalformedRow, match="no answer"):
        read(value, "given")
    assert read(value).messages[-1] == USER


@pytest.mark.parametrize(
    "row",
    [
        b'{"conversations": [{"from": ["human"], "value": "Why?"}]}',
        b'{"prompt": "\\ud83d"}',
        b"[" * 100_000,
        b'{"prompt": "caf\xe9"}',
    ],
    ids=["a speaker that is a list", "half an emoji", "endless nesting", "latin-1"],
)
def test_a_strange_row_is_malformed_rather_than_a_crash(row):
    with pytest.raises(MalformedRow):
        read(row)


speakers = st.sampled_from(["user", "human", "assistant", "gpt", "tool", None, 3, ["user"]])
texts = st.sampled_from(["a", "b c", "", " ", None, 3, [], [{"type": "text"}]])
turns = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": speakers, "content": texts}),
        st.fixed_dictionaries({"from": speakers, "value": texts}),
    ),
    max_size=4,
)
shapes = st.one_of(
    st.fixed_dictionaries({"messages": turns}),
    st.fixed_dictionaries({"conversations": turns}),
    st.fixed_dictionaries({"prompt": texts}, optional={"response": texts, "system": texts}),
)


@given(shapes, st.sampled_from(["generate", "given"]))
def test_any_row_is_either_malformed_or_ends_as_it_must(value, responses):
    try:
        messages = read(value, responses).messages
    except MalformedRow:
        return
    assert (messages[-1]["role"] == "assistant") == (responses == "given")
    assert any(m["role"] == "user" and m["content"] for m in messages)
    prompt_key(messages)


words = st.lists(st.from_regex(r"[a-z0-9]{1,6}", fullmatch=True), min_size=1, max_size=6)
gaps = st.text(" \t\n.,;:!?-\u2013\u2026\u3000\u00bf\"'()", min_size=1, max_size=4)


@given(words, st.lists(gaps, min_size=7, max_size=7), st.booleans())
def test_case_white_space_and_punctuation_make_no_other_prompt(found, between, upper):
    text = between[0] + "".join(w + g for w, g in zip(found, between[1:], strict=False))
    assert key(text.upper() if upper else text.title()) == key(" ".join(found))


@given(words, words)
def test_other_words_make_another_prompt(first, second):
    assert (key(" ".join(first)) == key(" ".join(second))) == (first == second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ÉTÉ", "ete"),
        ("राम", "रोम"),
        ("Explain C", "Explain C++"),
        ("Is 3 + 4 prime?", "Is 3 < 4 prime?"),
        ("🙂", "🙁"),
        ("日本", "日木"),
        ("1 2", "12"),
    ],
    ids=["accents", "vowel signs", "C++", "operators", "emoji", "ideographs", "numbers"],
)
def test_letters_marks_and_symbols_make_another_prompt(first, second):
    assert key(first) != key(second)


def test_only_user_turns_make_the_prompt():
    assert prompt_key([SYSTEM, USER, ANSWER]) == prompt_key([USER])
    assert key("Why?", "How?") != key("Why?")
    assert key("Why?", "How?") != key("How?", "Why?")


def test_text_parts_are_joined_and_other_parts_refused():
    parts = [{"type": "text", "text": "Why "}, {"type": "text", "text": "not?"}]
    found = read({"messages": [{"role": "user", "content": parts}]}, "generate")
    assert found.messages == [{"role": "user", "content": "Why not?"}]
    plain = read({"prompt": "why NOT"}, "generate")
    assert prompt_key(found.messages) == prompt_key(plain.messages)
    image = [{"type": "image", "url": "x"}]
    with pytest.raises(MalformedRow, match="parts that are not text"):
        read({"messages": [{"role": "user", "content": image}]}, "generate")


def test_a_prompt_may_be_a_list_of_messages():
    row = {"prompt": [USER], "completion": [ANSWER], "messages": None}
    assert read(row, "given").messages == [USER, ANSWER]


@pytest.mark.parametrize("key", ["id", "category"])
def test_half_a_surrogate_is_refused_wherever_it_stands(key):
    with pytest.raises(MalformedRow, match="surrogate"):
        parse(json.dumps({"prompt": "hi", key: "\ud800"}).encode(), 0, "generate")
