"""Rendering: ids as served, and a loss mask over exactly the target's answers."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill import target_config, target_tokenizer
from draftmill.errors import DraftmillError
from draftmill.rendering import CannotRender, Renderer
from tiny_target import CHATML

END = "<|im_end|>"
STOP_IDS = [2]
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = (  # earlier answers lose their thoughts, as with Qwen3 and others
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}"
    "{{ message['content'].split('</think>')[-1] }}{% else %}{{ message['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

REASONING = (  # thoughts in a field of their own, kept in the last answer only, as with Kimi-K2.5
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{{ '<think>' }}"
    "{% if loop.last %}{{ message.get('reasoning_content', '') }}{% endif %}{{ '</think>' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)


def chat(*texts: str) -> list[dict]:
    """user, assistant, user, ... with these texts."""
    return [
        {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)
    ]


def served(*texts: str) -> str:
    """What a ChatML server has seen after these turns; the last one is an answer."""
    turns = (f"<|im_start|>{m['role']}\n{m['content']}{END}" for m in chat(*texts))
    return "\n".join(turns)


def supervised(renderer: Renderer, sample) -> list[str]:
    """The text of each run of supervised tokens."""
    runs = groupby(zip(sample.mask, sample.ids, strict=True), key=lambda pair: pair[0])
    return [renderer.tokenizer.decode([i for _, i in run]) for kept, run in runs if kept]


@pytest.fixture
def renderer(tokenizer) -> Renderer:
    return Renderer(tokenizer, {}, STOP_IDS)


@pytest.fixture
def rendering(tokenizer_with):
    """template, arguments -> a renderer."""
    return lambda template, **kwargs: Renderer(tokenizer_with(template), kwargs, STOP_IDS)


def test_a_prompt_is_rendered_as_a_server_feeds_it(renderer):
    ids = renderer.prompt_ids([{"role": "system", "content": "Be brief."}, *chat("Why?")])
    expected = f"<|im_start|>system\nBe brief.{END}\n<|im_start|>user\nWhy?{END}\n"
    assert renderer.tokenizer.decode(ids) == expected + "<|im_start|>assistant\n"


def test_the_checkpoint_gives_the_same_renderer(tiny_target, renderer):
    source = {"folder": str(tiny_target), "trust_remote_code": False}
    manifest = {"checkpoint": source["folder"], "trust_remote_code": False}
    loaded = target_tokenizer.load(**source)
    found = Renderer(loaded, {}, target_config.stop_ids(manifest))
    messages = chat("Why?", "Because.", "How?", "So.")
    assert found.samples(messages) == renderer.samples(messages)


def test_the_mask_covers_exactly_the_answers_with_their_end_tokens(renderer):
    texts = ("Why?", "Because of\nthe rain.", "And then?", "Nothing.")
    [sample] = renderer.samples(chat(*texts))
    assert supervised(renderer, sample) == [texts[1] + END, texts[3] + END]
    assert renderer.tokenizer.decode(sample.ids) == served(*texts)
    assert sample.turn == 3
    assert renderer.tokenizer.decode(sample.ids[sample.start :]) == texts[3] + END


answers = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@given(st.lists(answers, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
def test_any_text_is_supervised_where_it_stands(renderer_of_chatml, texts):
    [sample] = renderer_of_chatml.samples(chat(*texts))
    assert supervised(renderer_of_chatml, sample) == [text + END for text in texts[1::2]]
    prompt = renderer_of_chatml.prompt_ids(chat(*texts)[:-1])
    assert sample.ids[: sample.start] == prompt
    assert len(sample.mask) == len(sample.ids)


@pytest.fixture(scope="module")
def renderer_of_chatml(tokenizer_with) -> Renderer:
    return Renderer(tokenizer_with(CHATML), {}, STOP_IDS)


def test_generation_marks_give_the_same_samples(renderer, rendering):
    marked = rendering(MARKED)
    assert marked.marked
    assert not renderer.marked
    for texts in (("Why?", "Because."), ("Why?", "Because.", "How?", "So.", "Oh?", "Yes.")):
        assert marked.samples(chat(*texts)) == renderer.samples(chat(*texts))


def test_marks_around_the_text_alone_leave_the_end_token_out(rendering):
    inner = MARKED.replace(" + '<|im_end|>' }}{% endg", " }}{% endg")
    narrow = rendering(
        inner.replace("{% endgeneration %}{{", "{% endgeneration %}{{ '<|im_end|>' +")
    )
    [sample] = narrow.samples(chat("Why?", "Because.", "How?", "So."))
    assert supervised(narrow, sample) == ["Because.", "So."]


def test_a_template_that_drops_earlier_thoughts_gives_a_sample_per_answer_as_served(rendering):
    forgetful = rendering(FORGETFUL)
    first, second = "<think>Hm.</think>Because.", "<think>Ah.</think>So."
    samples = forgetful.samples(chat("Why?", first, "How?", second))
    assert [sample.turn for sample in samples] == [1, 3]
    assert [supervised(forgetful, sample) for sample in samples] == [[first + END], [second + END]]
    texts = [forgetful.tokenizer.decode(sample.ids) for sample in samples]
    assert texts == [served("Why?", first), served("Why?", "Because.", "How?", second)]


def test_reasoning_in_a_field_of_its_own_is_supervised_as_it_was_served(rendering):
    maker = rendering(REASONING)
    messages = chat("Why?", "Because.", "How?", "So.")
    messages[1]["reasoning_content"] = "Hm."
    messages[3]["reasoning_content"] = "Well."
    first, last = maker.samples(messages)
    assert supervised(maker, first) == ["Hm.</think>Because." + END]
    assert supervised(maker, last) == ["Well.</think>So." + END]
    assert "Hm." not in maker.tokenizer.decode(last.ids)


def test_a_template_that_drops_nothing_here_gives_one_sample(rendering):
    [sample] = rendering(FORGETFUL).samples(chat("Why?", "Because.", "How?", "So."))
    assert sample.turn == 3


def test_turns_after_the_last_answer_are_left_out(renderer):
    assert renderer.samples(chat("Why?", "Because.", "How?")) == renderer.samples(
        chat("Why?", "Because.")
    )


def test_what_follows_the_end_token_is_not_supervised(rendering):
    chatty = rendering(CHATML.replace("'<|im_end|>' + '\n'", "'<|im_end|>' + ' (turn over)\n'"))
    [sample] = chatty.samples(chat("Why?", "Because.", "How?", "So."))
    assert supervised(chatty, sample) == ["Because." + END, "So." + END]
    assert sample.ids[-1] == STOP_IDS[0]


def test_marks_that_cover_nothing_are_the_named_cause_of_an_empty_mask(rendering):
    empty = MARKED.replace("{% generation %}", "{% generation %}{% endgeneration %}").replace(
        "}}{% endgeneration %}{{ '\n'", "}}{{ '\n'"
    )
    with pytest.raises(CannotRender, match=r"all zero.*generation marks cover no token"):
        rendering(empty).samples(chat("Why?", "Because."))


def test_an_answer_that_cannot_be_located_is_refused(rendering):
    thinking = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    with pytest.raises(CannotRender, match=r"cannot be located.*chat_template_kwargs"):
        rendering(thinking).samples(chat("Why?", "Because."))


def test_template_arguments_reach_the_template(rendering):
    switched = (
        CHATML + "{% if add_generation_prompt and not thinking %}{{ 'Plainly: ' }}{% endif %}"
    )
    on, off = rendering(switched, thinking=True), rendering(switched)
    decode = on.tokenizer.decode
    assert decode(off.prompt_ids(chat("Why?"))) == decode(on.prompt_ids(chat("Why?"))) + "Plainly: "
    assert on.samples(chat("Why?", "Because."))


def test_a_tokenizer_without_a_template_is_refused(rendering):
    with pytest.raises(DraftmillError, match="no chat template"):
        rendering(None)


@pytest.mark.parametrize("answer", [[300, 65, 300, 2], [72, 69, 76, 76, 79], [2]])
def test_the_engines_ids_are_kept_as_they_are(renderer, answer):
    prompt = renderer.prompt_ids(chat("Why?"))
    sample = renderer.answered(chat("Why?"), prompt, answer)
    assert sample.ids == prompt + answer
    assert sample.mask == [0] * len(prompt) + [1] * len(answer)
    assert (sample.turn, sample.start) == (1, len(prompt))


def test_earlier_answers_are_supervised_where_the_prompt_holds_them_unchanged(renderer, rendering):
    for maker, first, expected in (
        (renderer, "Because.", ["Because." + END]),
        (rendering(FORGETFUL), "<think>Hm.</think>Because.", []),
    ):
        messages = chat("Why?", first, "How?")
        prompt = maker.prompt_ids(messages)
        answer = maker.tokenizer("So." + END)["input_ids"]
        sample = maker.answered(messages, prompt, answer)
        assert supervised(maker, sample) == [*expected, "So." + END]
        assert sample.turn == 3


def test_an_answer_whose_first_token_melts_into_the_prompt_is_tokenized_as_served(rendering):
    merging = rendering(CHATML)
    merging.tokenizer.add_tokens(["\n\n"])  # as most real tokenizers have it
    [sample] = merging.samples(chat("Why?", "\n\nBecause."))
    assert sample.ids[: sample.start] == merging.prompt_ids(chat("Why?"))
    assert supervised(merging, sample) == ["\n\nBecause." + END]
    [sample] = merging.samples(chat("Why?", "Because.\n\nYes."))
    assert supervised(merging, sample) == ["Because.\n\nYes." + END]
