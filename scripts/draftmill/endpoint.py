"""An endpoint with the OpenAI API: the client with its key, the served model, and failures as sentences.

The client takes whatever a server sends for a response; so its bytes are read here, by models that
convert nothing. The key is read from the environment here and stands nowhere else: not in settings, logs, records or
errors.
"""

import os
import re
from typing import Annotated, ClassVar, Literal, TypeVar

import openai
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from draftmill.errors import DraftmillError

CONTEXT = re.compile(r"context[ _](length|window|size)|max_model_len|\btoo long\b", re.IGNORECASE)
LENGTH = (400, 413, 422)
TRANSIENT = (408, 409, 429)  # and all from 500 on: what the client retries
UNLISTED = (404, 405)  # not every endpoint lists its models
CONNECT_SECONDS = 10.0
QUOTED = 300  # characters of a server's message
BEGINNING = 60  # characters of a response that cannot be read
TELLING = (
    6  # characters of the key's beginning that are a part of it; fewer stand in ordinary words
)


class TooLong(Exception):
    """Why the server cannot take a prompt of this length."""


class Strict(BaseModel):
    """A part of a response: no value is converted, and what is not named here is left aside."""

    model_config = ConfigDict(strict=True)


class Choice(Strict):
    """One answer: its ids where the server gives them, and else its text."""

    index: Literal[0] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None

    @model_validator(mode="after")
    def holds_an_answer(self) -> "Choice":
        if self.text is None and self.token_ids is None:
            raise PydanticCustomError("no_answer", "Neither text nor token_ids")
        return self

    @property
    def stop(self) -> int | str | None:
        """What stopped the answer, where the server says so (vLLM: stop_reason, SGLang: matched_stop)."""
        return self.matched_stop if self.stop_reason is None else self.stop_reason


class Usage(Strict):
    prompt_tokens: Annotated[int, Field(ge=0)] | None = None
    completion_tokens: Annotated[int, Field(ge=0)] | None = None


class Completion(Strict):
    """The response to one prompt, for which one answer was asked."""

    name: ClassVar[str] = "a completion"
    choices: list[Choice] = Field(min_length=1, max_length=1)
    usage: Usage | None = None


class ServedModel(Strict):
    id: str


class ServedModels(Strict):
    """The list of models."""

    name: ClassVar[str] = "a list of models"
    data: list[ServedModel]


Response = TypeVar("Response", Completion, ServedModels)


class Endpoint:
    """One endpoint; `options` are those of the plan: base_url, retries, timeout_seconds, api_key_env."""

    def __init__(self, options: dict):
        self.url = options["base_url"]
        self.retries = options["retries"]
        self.key_name = options["api_key_env"]
        self.key = os.environ.get(self.key_name, "").strip()
        seconds = options["timeout_seconds"]
        self.client = openai.AsyncOpenAI(
            api_key=self.key or "none",  # given, or the client would take another variable's
            base_url=self.url,
            max_retries=self.retries,
            timeout=openai.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS)),
        )
        self.headers = {} if self.key else {"Authorization": openai.Omit()}

    async def model(self, wanted: str | None) -> str:
        """The served model's name: the wanted one, or the only one where none is named.

        Raises DraftmillError where the endpoint lists others only, or several to choose from, or
        where its list cannot be read.
        """
        where = "the list of models"
        try:
            response = await self.client.models.with_raw_response.list(extra_headers=self.headers)
            listed = self.read(ServedModels, response.content, where)
            served = [model.id for model in listed.data]
        except openai.OpenAIError as error:
            if getattr(error, "status_code", None) not in UNLISTED:
                raise self.failure(error, where, {}) from None
            served = []
        if wanted is None and len(served) == 1:
            return served[0]
        if wanted is None or (served and wanted not in served):
            found = f"serves {self.quotable(', '.join(served))}" if served else "lists no models"
            asked = "no model is named" if wanted is None else f"'{wanted}' is asked for"
            raise DraftmillError(
                f"{self.url}: {found}, but {asked}; set responses.openai.model to the name under which the "
                "target is served there."
            )
        return wanted

    async def complete(self, where: str, extra_body: dict, **request) -> Completion:
        """The response to one request for a completion, retried with back-off where that can help.

        Raises TooLong for a prompt beyond the server's context, DraftmillError for every other failure
        and for a response that is no completion.
        """
        try:
            response = await self.client.completions.with_raw_response.create(
                **request, extra_body=extra_body, extra_headers=self.headers
            )
        except openai.OpenAIError as error:
            if self.too_long(error):
                raise TooLong(f"{self.url} refuses its length: {self.message_of(error)}") from None
            raise self.failure(error, where, extra_body) from None
        return self.read(Completion, response.content, where)

    def read(self, kind: type[Response], content: bytes, where: str) -> Response:
        """A successful response as the model of its kind; DraftmillError where it is something else."""
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = "".join(f"{part}: " for part in [".".join(map(str, first["loc"]))] if part)
        beginning = self.quotable(content.decode(errors="replace"))[:BEGINNING]
        raise DraftmillError(
            f"{where}: {self.url} answers with what cannot be read as {kind.name} ({place}{first['msg']}), "
            f"beginning with {beginning!r}; responses.openai.base_url must be the root of an "
            "OpenAI-compatible API, most often ending in /v1."
        )

    def too_long(self, error: openai.OpenAIError) -> bool:
        words = f"{getattr(error, 'code', '')} {self.message_of(error)}"
        return getattr(error, "status_code", None) in LENGTH and bool(CONTEXT.search(words))

    def failure(self, error: openai.OpenAIError, where: str, extra_body: dict) -> DraftmillError:
        """What the client raised, as one sentence without the key."""
        status = getattr(error, "status_code", None)
        if status in (401, 403):  # the message may quote the key, whole or in part: not repeated
            held = "is refused" if self.key else "is not set"
            return DraftmillError(
                f"{self.url}: answers {status}: the key in the environment variable {self.key_name} {held}; "
                "put a key that this endpoint accepts there, in the environment of the jobs "
                "(responses.openai.api_key_env names the variable)."
            )
        message = self.message_of(error)
        if status is None or status in TRANSIENT or status >= 500:
            return DraftmillError(
                f"{where}: {self.url} failed in {self.retries + 1} attempts, at last with: {message}; look at "
                "the server, raise responses.openai.retries or timeout_seconds if it only needs time, and "
                "start Snakemake again."
            )
        refused = [name for name in extra_body if re.search(rf"\b{re.escape(name)}\b", message)]
        hint = "mend the request's settings under responses, or the server"
        if refused:
            hint = (
                f"if the API does not know the field '{refused[0]}', set responses.openai.extensions: false; if "
                "the value is yours, mend responses.openai.extra_body"
            )
        return DraftmillError(f"{where}: {self.url} answers {status}: {message}; {hint}.")

    def message_of(self, error: openai.OpenAIError) -> str:
        """The server's own words about an error."""
        body = getattr(error, "body", None)
        text = body.get("message") or body if isinstance(body, dict) else body or str(error)
        return self.quotable(str(text))

    def quotable(self, text: str) -> str:
        """A server's words in one line, shortened, without the key or its beginning, which servers quote."""
        line = " ".join(text.split())
        shortest = max(1, min(TELLING, len(self.key)))
        for length in range(len(self.key), shortest - 1, -1):
            line = line.replace(self.key[:length], "[key]")
        return line[:QUOTED].rstrip(" .")
