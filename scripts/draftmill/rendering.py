"""Conversations as token ids through the target's chat template, and the loss mask over its answers."""

import re
from dataclasses import dataclass

import jinja2
import transformers

from draftmill import target_tokenizer
from draftmill.errors import DraftmillError

GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True)
class Sample:
    """One training sequence: ids, loss mask (1 where the target's answer stands), the answer's start.

    `start` is the index of the first token of the last answer.
    """

    turn: int
    ids: list[int]
    mask: list[int]
    start: int


class CannotRender(ValueError):
    """Why a row cannot be rendered: its own fault, not the target's."""


class Renderer:
    """One tokenizer with its template arguments."""

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        template_kwargs: dict,
        stop_ids: list[int],
        rows: int | None = None,  # of the target's embedding
    ):
        if tokenizer.chat_template is None:
            raise DraftmillError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template, so prompts cannot be "
                "rendered as served; give a target that has one."
            )
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs
        self.stop_ids = set(stop_ids)
        self.rows = rows
        self.marked = bool(GENERATION_MARK.search(str(tokenizer.get_chat_template())))

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """What a server feeds the target before it answers."""
        return self._ids(messages, add_generation_prompt=True)

    def _ids(self, messages: list[dict], **kwargs) -> list[int]:
        ids = self._render(messages, return_dict=False, **kwargs)
        if self.rows is not None and ids and max(ids) >= self.rows:
            raise CannotRender(
                f"it holds the token {max(ids)}, which is no row of the target's embedding"
            )
        return ids

    def _render(self, messages: list[dict], **kwargs):
        try:
            return self.tokenizer.apply_chat_template(messages, **self.template_kwargs, **kwargs)
        except (jinja2.TemplateError, TypeError) as error:
            raise CannotRender(f"the chat template refuses the conversation ({error})") from None

    def samples(self, messages: list[dict]) -> list[Sample]:
        """One sample over the whole conversation where every answer's rendering is a prefix of it;
        otherwise one sample per assistant turn, each rendered as served.

        Raises CannotRender where an answer cannot be located in the template's rendering, or where
        nothing would be trained.
        """
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        messages = messages[: turns[-1] + 1]
        whole = self._ids(messages)
        mask, spans, nested = [0] * len(whole), [], True
        for turn in turns:
            start, ids = self._answer(messages[: turn + 1])
            spans.append((turn, start, ids))
            nested = nested and whole[: len(ids)] == ids
            if nested:
                mask[start : len(ids)] = [1] * (len(ids) - start)
        if nested:
            if self.marked:
                mask = self._marked_mask(messages)
            return [Sample(turns[-1], *self._cut(whole, mask), spans[-1][1])]
        return [
            Sample(turn, *self._cut(ids, [0] * start + [1] * (len(ids) - start)), start)
            for turn, start, ids in spans
        ]

    def _answer(self, messages: list[dict]) -> tuple[int, list[int]]:
        """Where the last turn's answer starts, and the ids up to its end token."""
        before = self.prompt_ids(messages[:-1])
        ids = self._ids(messages)
        if ids[: len(before)] != before:
            # a token reaches over the border: tokenize the answer by itself, as it is served
            ids = before + self._answer_ids(messages)
        # what the template adds after the end token is not the model's
        ends = [i for i in range(len(before), len(ids)) if ids[i] in self.stop_ids]
        return len(before), ids[: ends[-1] + 1] if ends else ids

    def _answer_ids(self, messages: list[dict]) -> list[int]:
        prompt = self._render(messages[:-1], tokenize=False, add_generation_prompt=True)
        text = self._render(messages, tokenize=False)
        if not text.startswith(prompt):
            raise CannotRender(
                "the rendering of the answered conversation does not start with that of its prompt "
                f"(turn {len(messages) - 1}), so the answer cannot be located; check "
                "target.chat_template_kwargs (thinking on or off)"
            )
        return self.tokenizer(text[len(prompt) :], add_special_tokens=False)["input_ids"]

    def _marked_mask(self, messages: list[dict]) -> list[int]:
        marks = self._render(messages, return_dict=True, return_assistant_tokens_mask=True)
        return list(marks["assistant_masks"])

    @staticmethod
    def _cut(ids: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
        """Without what follows the last supervised token."""
        last = max((i for i, m in enumerate(mask) if m), default=-1)
        if last < 0:
            raise CannotRender(
                "the loss mask is all zero, so nothing would be trained: the chat template's generation "
                "marks cover no token, or the answers are empty"
            )
        return ids[: last + 1], mask[: last + 1]

    def answered(self, messages: list[dict], prompt: list[int], answer: list[int]) -> Sample:
        """A conversation whose last answer the engine gave as ids: nothing is tokenized twice."""
        mask = [0] * len(prompt)
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        for turn in turns:  # earlier answers, where they stand in the prompt unchanged
            try:
                start, ids = self._answer(messages[: turn + 1])
            except CannotRender:
                continue
            if prompt[: len(ids)] == ids:
                mask[start : len(ids)] = [1] * (len(ids) - start)
        ids, mask = self._cut(prompt + answer, mask + [1] * len(answer))
        return Sample(len(messages), ids, mask, len(prompt))


def renderer_of(manifest: dict, template_kwargs: dict) -> Renderer:
    """The renderer of a prepared target."""
    tokenizer = target_tokenizer.tokenizer_of(manifest)
    return Renderer(tokenizer, template_kwargs, manifest["stop_ids"], manifest["embedding_rows"])
