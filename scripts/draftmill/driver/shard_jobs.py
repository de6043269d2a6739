"""Jobs that work through several shards, so that a large target is loaded once for all of them.

How many is a resource (shards_per_job), since no byte depends on it: it comes from a profile or from
--set-resources. Only shards that are not as planned are put together; each keeps settings and a fingerprint of
its own. The rules of such jobs are made while the workflow is read, under the rule's name and a number.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from draftmill.atomic import write_json
from draftmill.driver.provenance import record_of, settings_in
from draftmill.errors import DraftmillError

RESOURCE = "shards_per_job"
# settings and paths of a job travel on one command line, which Linux ends at 128 KiB
MOST_SHARDS = 200
Shards = list[tuple[str, str, str]]  # capture, source, shard


def shards_per_job(workflow, rule: str) -> int:
    """The resource as profile or command line give it; 1 where they do not.

    Raises DraftmillError where it is no integer from 1 to MOST_SHARDS.
    """
    found = workflow.resource_settings._parsed_overwrite_resources.get(rule, {}).get(RESOURCE)
    value = 1 if found is None else getattr(found, "value", found)
    if not isinstance(value, int) or not 1 <= value <= MOST_SHARDS:
        raise DraftmillError(
            f"{RESOURCE} of {rule} is {value!r}, expected an integer from 1 to {MOST_SHARDS}; set it in a "
            "profile or by --set-resources."
        )
    return value


def grouped(shards: Shards, size: int) -> list[Shards]:
    """Jobs of at most `size` shards of one capture each; none for a shard that would be alone."""
    by_capture: dict[str, Shards] = defaultdict(list)
    for shard in shards:
        by_capture[shard[0]].append(shard)
    jobs = [
        members[i : i + size]
        for _, members in sorted(by_capture.items())
        for i in range(0, len(members), size)
    ]
    return [job for job in jobs if len(job) > 1]


def inherit(workflow, rule: str, name: str) -> None:
    """Gives a made rule the resources and threads that were set for the rule it stands for, and precedence
    over it."""
    for settings in ("_parsed_overwrite_resources", "_parsed_overwrite_threads"):
        values = getattr(workflow.resource_settings, settings)
        if rule in values:
            values[name] = values[rule]
    workflow.ruleorder(name, rule)


def recorded_with(path: str, settings: str) -> bool:
    """Whether this clone's Snakemake has built the file with these settings, alone or among others."""
    file = record_of(path)
    return file.is_file() and settings in settings_in(json.loads(file.read_bytes()))


def settle(path: str, rule: str, settings: str, inputs: list[str]) -> None:
    """Makes Snakemake's record of a shard that a job of several built that of a job of its own.

    Otherwise it would look stale in other company: Snakemake compares all params and inputs of the job.
    """
    file = record_of(path)
    if not file.is_file():
        return
    record: dict[str, Any] = json.loads(file.read_bytes())
    found = settings_in(record)
    if len(found) > 1 and settings in found:
        alone = {"params": [repr(settings)], "input": sorted(inputs), "rule": rule}
        write_json(file, record | alone)


def members_of(jobs: dict[str, list[Shards]], rule: str) -> list[Shards]:
    """The jobs of a rule, as tuples again after a plan was read from its file."""
    return [[tuple(shard) for shard in job] for job in jobs.get(rule, [])]


def planned(path: Path) -> dict[str, list[Shards]]:
    """The jobs in the driver's plan, for child processes, which must name the same rules."""
    return json.loads(path.read_text())["jobs"] if path.is_file() else {}
