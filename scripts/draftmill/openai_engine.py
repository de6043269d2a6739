"""Answers from a server with the OpenAI completions API: vLLM, SGLang or a hosted one.

Prompts go there as the project's own token ids, so the server renders and tokenizes nothing, and the
answers' ids come back as the engine made them where it knows `return_token_ids`; elsewhere the text is
tokenized here, and such answers are counted, since their ids may differ from the engine's.
"""

import asyncio
import time

from draftmill.endpoint import Choice, Completion, Endpoint, TooLong
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
        self.vocabulary = min(task.manifest["vocab_size"], task.manifest["embedding_rows"])
        self.limit = task.settings["max_new_tokens"]
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
            self.check_prompt(where, self.task.prompts[row], response)
            answer = self.answer_of(where, response.choices[0])
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
            "max_tokens": self.limit,
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

    def check_prompt(self, where: str, sent: list[int], response: Completion) -> None:
        """Refuses an answer to other ids than were sent: all that follows would be conditioned on them."""
        used = response.choices[0].prompt_token_ids
        counted = response.usage.prompt_tokens if response.usage else None
        count = len(used) if used is not None else counted
        if (used is not None and used != sent) or count not in (None, len(sent)):
            raise DraftmillError(
                f"{where}: {self.endpoint.url} answered a prompt of {count} tokens that is not the one of "
                f"{len(sent)} tokens sent; the server adds or cuts tokens: serve the target with its own "
                "tokenizer, and without truncation of prompts."
            )

    def answer_of(self, where: str, choice: Choice) -> dict:
        """The ids up to the first end token, which is added where the server leaves it out.

        A text may have more tokens here than in the engine; those beyond the limit are cut off.
        """
        self.check_end(where, choice)
        ids = choice.token_ids
        if ids is None:
            self.retokenized += 1
            ids = self.task.tokenizer(choice.text, add_special_tokens=False)["input_ids"]
        elif len(ids) > self.limit:
            raise DraftmillError(
                f"{where}: {self.endpoint.url} answers with {len(ids)} token ids where max_tokens: "
                f"{self.limit} was sent (responses.max_new_tokens); use a server that keeps to it."
            )
        self.check_ids(where, ids)
        end = next((i for i, token in enumerate(ids) if token in self.stop_ids), None)
        if end is not None:
            ids = ids[: end + 1]
        elif choice.finish_reason == "stop":
            ids = [*ids, self.end_token(choice.stop)]
        ids = ids[: self.limit]
        ended = bool(ids) and ids[-1] in self.stop_ids
        return {"response_ids": ids, "finish_reason": "stop" if ended else "length"}

    def check_end(self, where: str, choice: Choice) -> None:
        """Refuses an answer that something else ended than an end of the target or the limit."""
        reason, matched = choice.finish_reason, choice.stop
        if isinstance(matched, str):
            cause = f"at the stop string {self.endpoint.quotable(repr(matched))}"
        elif matched is not None and matched not in self.stop_ids:
            cause = f"at the token {matched}, which is no end of the target"
        elif reason not in ("stop", "length"):
            cause = f"with {self.endpoint.quotable(repr(reason))}"
        else:
            return
        raise DraftmillError(
            f"{where}: {self.endpoint.url} ended the answer {cause}, where only an end token "
            f"({', '.join(map(str, self.stop_ids))}) or the length limit may end it; switch the filter, tool, "
            "stop token or stop string off, or take the row out."
        )

    def check_ids(self, where: str, ids: list[int]) -> None:
        """Refuses ids that the target does not have."""
        unknown = next((token for token in ids if not 0 <= token < self.vocabulary), None)
        if unknown is not None:
            raise DraftmillError(
                f"{where}: {self.endpoint.url} answers with the token id {unknown}, but the target has "
                f"{self.vocabulary} tokens: another model is served there."
            )

    def check_length(self, answer: dict, response: Completion) -> None:
        """Refuses an answer that ended before its limit: a server whose context is full says no more
        than "length"."""
        choice, made = response.choices[0], answer["response_ids"]
        if "stop" in (choice.finish_reason, answer["finish_reason"]):
            return
        counted = response.usage.completion_tokens if response.usage else None
        count = len(made) if choice.token_ids is not None or not made else counted
        if count is not None and count < self.limit:
            raise TooLong(
                f"the context of {self.endpoint.url} ended the answer after {count} of {self.limit} tokens "
                "(responses.max_new_tokens)"
            )

    def end_token(self, matched: int | None) -> int:
        """The end token that the engine stopped at: the one it names, else the tokenizer's own."""
        for token in (matched, self.task.tokenizer.eos_token_id):
            if token in self.stop_ids:
                return token
        return self.stop_ids[0]


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
