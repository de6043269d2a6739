"""The engine that answers: what of its configuration decides the answers, and how it is reached."""

import os
import re
from urllib.parse import urlsplit

from draftmill.errors import DraftmillError

URL_VARIABLE = "OPENAI_BASE_URL"
REACHED_BY = ("base_url", "concurrency", "retries", "timeout_seconds", "api_key_env")
SET_BY_STAGES = (
    "prompt",
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "n",
    "seed",
    "stream",
    "echo",
    "best_of",
    "suffix",
    "stop",
    "stop_token_ids",
    "return_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def check(responses: dict) -> None:
    """Refuses an endpoint that cannot be reached as configured, before anything runs."""
    if responses["backend"] != "openai":
        return
    section = responses["openai"]
    url, place = base_url(section), "responses.openai.base_url"
    if not url:
        raise DraftmillError(
            f"config: 'responses.backend' is openai, but '{place}' is null and the environment variable "
            f"{URL_VARIABLE} is not set; give the root of the API, such as http://localhost:8000/v1."
        )
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise DraftmillError(
            f"config: '{place}' (or {URL_VARIABLE}) is no http(s)://host/path; give the root of the API, such "
            "as http://localhost:8000/v1."
        )
    if parts.username or parts.password:
        raise DraftmillError(
            f"config: '{place}' (or {URL_VARIABLE}) holds a user or a password; put the key into the "
            "environment variable that 'responses.openai.api_key_env' names."
        )
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", section["api_key_env"]):
        raise DraftmillError(  # the value is not repeated: it may be the key itself
            "config: 'responses.openai.api_key_env' is no name of an environment variable; put the key into "
            "a variable, and its name here."
        )
    for key in SET_BY_STAGES:
        if key in section["extra_body"]:
            raise DraftmillError(
                f"config: 'responses.openai.extra_body.{key}' is set by the stages; leave it out."
            )


def base_url(section: dict) -> str | None:
    return section["base_url"] or os.environ.get(URL_VARIABLE)


def science(responses: dict) -> dict:
    """What decides the answers: what stands in the settings of the jobs."""
    kept = {key: value for key, value in responses.items() if key != "openai"}
    if responses["backend"] == "openai":
        section = responses["openai"]
        kept["openai"] = {k: v for k, v in section.items() if k not in REACHED_BY}
        del kept["batch_size"]  # a server batches as it likes
    return kept


def reached(responses: dict) -> dict:
    """How the engine is reached: what the jobs get beside their settings."""
    if responses["backend"] != "openai":
        return {}
    section = responses["openai"]
    return {key: section[key] for key in REACHED_BY} | {"base_url": base_url(section)}
