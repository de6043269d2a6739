"""A job that asks a server for its answers, and what became of them."""

from pathlib import Path

import pytest

from draftmill import tables
from draftmill.errors import DraftmillError
from fake_endpoint import FakeEndpoint, serving
from mini_road import MiniRoad

END = 2  # the tiny target's end token


def answers(road: MiniRoad, source: str = "judge") -> list[dict]:
    return tables.read(road.table("responses", source))


def refusal(asked, reply, endpoint: FakeEndpoint | None = None, **settings) -> str:
    """The sentence with which the job ends; no table is left."""
    endpoint = endpoint or FakeEndpoint(reply)
    with serving(endpoint), pytest.raises(DraftmillError) as caught:
        asked(endpoint, **settings)
    assert not list(Path("results/tiny/responses").rglob("*"))
    assert "\n" not in str(caught.value)
    assert endpoint.url in str(caught.value)
    return str(caught.value)
