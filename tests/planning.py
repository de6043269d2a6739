"""Estimates of test configurations."""

from draftmill.driver.config import completed
from draftmill.driver.estimate import Options, estimate
from draftmill.driver.plan import Plan
from draftmill.driver.token_estimate import Assumed

HUB = {"hub": "a/b", "revision": "0" * 40}


def planned(config: dict, **options) -> dict:
    given = {"assumed": Assumed()} | options
    return estimate(Plan(completed(config)), Options(**given))


def hub_source(**more) -> dict:
    about = {"kind": "hub", "id": "a/b", "revision": "0" * 40, "rows": 1000, "shard_size": 100}
    return about | more
