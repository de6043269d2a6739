"""Results that this clone did not make: do they fit the plan?

Snakemake knows in .snakemake/metadata what it built itself, and rebuilds it when settings change. Files
that came another way (a fresh clone on old results, a copy from another machine over its own) it takes as
they are. So each file is opened here once after it changed, and compared by the fingerprint that it
carries.
"""

import ast
import json
import re
from base64 import urlsafe_b64encode
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

from draftmill.atomic import write_json
from draftmill.driver.artefacts import Artefact, artefacts
from draftmill.driver.plan import Plan
from draftmill.driver.sources import stat_key
from draftmill.stage import fingerprint_of

METADATA = Path(".snakemake") / "metadata"
SEEN = Path(".draftmill") / "seen.json"
TEXT_MARK = re.compile(rb"draftmill-fingerprint:([0-9a-f]{16})")
UNREADABLE = (pa.ArrowException, SafetensorError, OSError, ValueError, KeyError, TypeError)
PART = 254  # Snakemake splits longer record names into folders


def record_of(path: str) -> Path:
    """Where Snakemake keeps its record of an output (snakemake/persistence/file.py)."""
    name = urlsafe_b64encode(path.encode()).decode()
    parts = [name[i : i + PART] for i in range(0, len(name), PART)]
    return METADATA.joinpath(*(f"@{part}" for part in parts[:-1]), parts[-1])


def snakemake_rebuilds(path: str, fingerprint: str) -> bool:
    """Whether this clone's Snakemake has a record of the file, with other settings than the planned ones:
    then it sees by itself that the file is stale.
    """
    record = record_of(path)
    if not record.is_file():
        return False
    found = settings_in(json.loads(record.read_bytes()))
    return fingerprint not in map(fingerprint_of, found)


def settings_in(record: dict) -> list[str]:
    """The settings strings in a record of Snakemake, which holds params as Python literals: one, or the list of
    a job of several shards."""
    values = map(ast.literal_eval, record.get("params") or [])
    lists = (value if isinstance(value, list) else [value] for value in values)
    return [str(settings) for found in lists for settings in found]


def recorded_fingerprint(path: Path) -> str | None:
    """The fingerprint that a file of this project carries; None where there is none."""
    try:
        if path.suffix == ".parquet":
            footer = json.loads((pq.read_metadata(path).metadata or {})[b"draftmill"])
            return footer.get("record", footer)["fingerprint"]
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                return json.loads((file.metadata() or {})["draftmill"])["fingerprint"]
        if path.suffix == ".json":
            return json.loads(path.read_bytes())["fingerprint"]
        found = TEXT_MARK.search(path.read_bytes())
        return found.group(1).decode() if found else None
    except UNREADABLE:
        return None


def remembered_fingerprints() -> dict[str, list]:
    """path -> [state of the file, fingerprint in it]; empty where nothing is remembered yet."""
    try:
        return json.loads(SEEN.read_text())
    except (OSError, ValueError):
        return {}


def compare(plan: Plan) -> tuple[set[str], list[Artefact]]:
    """The paths of the artefacts that are as planned, and those that are not and that Snakemake would keep.

    Artefacts that do not exist are in neither.
    """
    seen = remembered_fingerprints()
    before, fresh, foreign = dict(seen), set(), []
    for artefact in artefacts(plan):
        path = Path(artefact.path)
        if not path.is_file():
            continue
        key = stat_key(path)
        if seen.get(artefact.path, [None])[0] != key:
            seen[artefact.path] = [key, recorded_fingerprint(path)]
        if seen[artefact.path][1] == artefact.fingerprint:
            fresh.add(artefact.path)
        elif not snakemake_rebuilds(artefact.path, artefact.fingerprint):
            foreign.append(artefact)
    if seen != before:
        write_json(SEEN, seen)
    return fresh, foreign
