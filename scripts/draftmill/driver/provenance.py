"""Results that this clone did not make: do they fit the plan?

Snakemake knows in .snakemake/metadata what it built itself, and rebuilds it when settings change. Files
that came another way (a fresh clone on old results, a copy from another machine) it takes as they are.
Those are opened here, once, and compared by the fingerprint that they carry.
"""

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

METADATA = Path(".snakemake") / "metadata"
SEEN = Path(".draftmill") / "seen.json"
TEXT_MARK = re.compile(rb"draftmill-fingerprint:([0-9a-f]{16})")
UNREADABLE = (pa.ArrowException, SafetensorError, OSError, ValueError, KeyError, TypeError)
PART = 254  # Snakemake splits longer record names into folders


def known_to_snakemake(path: str) -> bool:
    """Whether this clone's Snakemake has a record of the file (snakemake/persistence/file.py)."""
    name = urlsafe_b64encode(path.encode()).decode()
    parts = [name[i : i + PART] for i in range(0, len(name), PART)]
    return METADATA.joinpath(*(f"@{part}" for part in parts[:-1]), parts[-1]).exists()


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


def stale(plan: Plan, only_foreign: bool) -> list[Artefact]:
    """Existing artefacts whose fingerprint is not the planned one.

    only_foreign: leaves out what Snakemake has a record of, and so would rebuild by itself.
    """
    seen = json.loads(SEEN.read_text()) if SEEN.is_file() else {}
    before, found = dict(seen), []
    for artefact in artefacts(plan):
        path = Path(artefact.path)
        if (only_foreign and known_to_snakemake(artefact.path)) or not path.is_file():
            continue
        key = stat_key(path)
        if seen.get(artefact.path, [None])[0] != key:
            seen[artefact.path] = [key, recorded_fingerprint(path)]
        if seen[artefact.path][1] != artefact.fingerprint:
            found.append(artefact)
    if seen != before:
        write_json(SEEN, seen)
    return found


def foreign_and_stale(plan: Plan) -> list[Artefact]:
    return stale(plan, only_foreign=True)
