"""Answers from a server with the OpenAI completions API: vLLM, SGLang or a hosted one.

Prompts go there as the project's own token ids, so the server renders and tokenizes nothing, and the
answers' ids come back as the engine made them where it knows `return_token_ids`; elsewhere the text is
tokenized here, and such answers are counted, since their ids may differ from the engine's.
"""

import asyncio
import time

from draftmill.endpoint import Endpoint, TooLong
from draftmill.errors import DraftmillError
from draftmill.generation import Task

SEED_BITS = 31  # what every server takes
# servers take defaults from the checkpoint's generation_config, which would make other text than the
# configuration says ("greedy" text that greedy verification never emits)
NEUTRAL = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
AS_IS = {
    "return_token_ids": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}


def generate(task: Task) -> tuple[dict[int, dict], dict]:
    """The answers of a task, and the model that gave them.

    Raises DraftmillError where the endpoint fails for good, serves another model or changes a prompt.
    """
    return asyncio.run(Engine(task).answers())


class Engine:
    """One task at one endpoint."""

    def __init__(self, task: Task):
        self.task = task
        self.endpoint = Endpoint(task.options)
        self.stop_ids = task.manifest["stop_ids"]
        self.progress = Progress(len(task.prompts), task.options["concurrency"])
        self.retokenized = 0
        self.found: dict[int, dict] = {}

    async def answers(self) -> tuple[dict[int, dict], dict]:
        limit = asyncio.Semaphore(self.task.options["concurrency"])
        async with self.endpoint.client:
            model = await self.endpoint.model(self.task.settings["openai"]["model"])

            async def one(row: int) -> None:
                async with limit:
                    await self.answer(row, model)

            try:
                async with asyncio.TaskGroup() as group:
                    for row in sorted(self.task.prompts):
                        group.create_task(one(row))
            except ExceptionGroup as failed:  # one sentence: the first ends the others
                raise failed.exceptions[0] from None
        if self.retokenized:
            print(
                f"{self.retokenized} of {len(self.found)} answers came without token ids and were tokenized "
                "from their text; their ids may differ from the engine's",
                flush=True,
            )
        engine = {"backend": "openai", "model": model}
        return self.found, {"engine": engine, "dtypes": {}, "retokenized": self.retokenized}

    async def answer(self, row: int, model: str) -> None:
        where = self.task.where(row)
        try:
            response = await self.endpoint.complete(
                where, self.extra_body(), model=model, **self.request(row)
            )
            choice = (getattr(response, "choices", None) or [None])[0]
            if choice is None:
                raise DraftmillError(
                    f"{where}: {self.endpoint.url} answers without a choice; responses.openai.base_url must "
                    "be the root of an OpenAI-compatible API, most often ending in /v1."
                )
            self.check_prompt(where, self.task.prompts[row], choice, response)
            answer = self.answer_of(where, choice)
            self.check_length(answer, response)
        except TooLong as error:
            self.task.skip(row, str(error))
            return
        self.found[row] = answer
        self.progress.add(len(answer["response_ids"]))

    def request(self, row: int) -> dict:
        """The part of a request that the API itself defines."""
        settings = self.task.settings
        request = {
            "prompt": self.task.prompts[row],
            "max_tokens": settings["max_new_tokens"],
            "temperature": settings["temperature"],
            "top_p": settings.get("top_p", 1.0),
            "n": 1,
        }
        if settings["temperature"] > 0:
            request["seed"] = self.task.seed(row, SEED_BITS)
        return request

    def extra_body(self) -> dict:
        """The configured fields and, unless switched off, the extensions that vLLM and SGLang share.

        Greedy text is greedy whatever the configured fields say.
        """
        own = self.task.settings["openai"]
        if not own["extensions"]:
            return own["extra_body"]
        sampled = self.task.settings["temperature"] > 0
        fields = NEUTRAL | own["extra_body"] if sampled else own["extra_body"] | NEUTRAL
        return fields | AS_IS | {"stop_token_ids": self.stop_ids}

    def check_prompt(self, where: str, sent: list[int], choice, response) -> None:
        """Refuses an answer to other ids than were sent: all that follows would be conditioned on them."""
        used = getattr(choice, "prompt_token_ids", None)
        count = len(used) if used is not None else getattr(response.usage, "prompt_tokens", None)
        if (used is not None and list(used) != sent) or count not in (None, len(sent)):
            raise DraftmillError(
                f"{where}: {self.endpoint.url} answered a prompt of {count} tokens that is not the one of "
                f"{len(sent)} tokens sent; the server adds or cuts tokens: serve the target with its own "
                "tokenizer, and without truncation of prompts."
            )

    def answer_of(self, where: str, choice) -> dict:
        """The ids up to the first end token, which is added where the server leaves it out."""
        reason, matched = choice.finish_reason, stop_of(choice)
        if reason not in ("stop", "length") or isinstance(matched, str):
            cause = (
                f"at the stop string {matched!r}"
                if isinstance(matched, str)
                else f"with {reason!r}"
            )
            raise DraftmillError(
                f"{where}: {self.endpoint.url} ended the answer {cause}, where only an end token or the "
                "length limit may end it; switch the filter, tool or stop string off, or take the row out."
            )
        ids = getattr(choice, "token_ids", None)
        if ids is None:
            self.retokenized += 1
            ids = self.task.tokenizer(choice.text, add_special_tokens=False)["input_ids"]
        if ids and max(ids) >= self.task.manifest["vocab_size"]:
            raise DraftmillError(
                f"{where}: {self.endpoint.url} answers with the token id {max(ids)}, but the target has "
                f"{self.task.manifest['vocab_size']} tokens: another model is served there."
            )
        end = next((i for i, token in enumerate(ids) if token in self.stop_ids), None)
        if end is not None:
            return {"response_ids": list(ids[: end + 1]), "finish_reason": "stop"}
        added = [self.end_token(matched)] if reason == "stop" else []
        return {"response_ids": [*ids, *added], "finish_reason": reason}

    def check_length(self, answer: dict, response) -> None:
        """Refuses an answer that ended before its limit: a server whose context is full says no more
        than "length"."""
        limit = self.task.settings["max_new_tokens"]
        count = getattr(response.usage, "completion_tokens", None)
        if answer["finish_reason"] == "length" and count is not None and count < limit:
            raise TooLong(
                f"the context of {self.endpoint.url} ended the answer after {count} of {limit} tokens "
                "(responses.max_new_tokens)"
            )

    def end_token(self, matched: int | None) -> int:
        """The end token that the engine stopped at: the one it names, else the tokenizer's own."""
        for token in (matched, self.task.tokenizer.eos_token_id):
            if token in self.stop_ids:
                return token
        return self.stop_ids[0]


def stop_of(choice) -> int | str | None:
    """What stopped the answer, where the server says so (vLLM: stop_reason, SGLang: matched_stop)."""
    named = getattr(choice, "stop_reason", None)
    return getattr(choice, "matched_stop", None) if named is None else named


class Progress:
    """Prints the rate and the time left once per round of requests."""

    def __init__(self, total: int, every: int):
        self.total, self.every = total, every
        self.began, self.done, self.tokens = time.monotonic(), 0, 0

    def add(self, tokens: int) -> None:
        self.done, self.tokens = self.done + 1, self.tokens + tokens
        if self.done % self.every and self.done < self.total:
            return
        seconds = time.monotonic() - self.began
        left = seconds / self.done * (self.total - self.done)
        rate = self.tokens / seconds
        print(f"{self.done}/{self.total}: {rate:.0f} tokens/s, {left:.0f} s left", flush=True)
