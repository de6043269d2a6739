"""One shard of a source's rows as conversations of one shape."""

import argparse
import json
from pathlib import Path

import pyarrow as pa

from draftmill import raw_rows, tables
from draftmill.conversations import MalformedRow, parse, prompt_key
from draftmill.errors import DraftmillError
from draftmill.skips import Skips
from draftmill.stage import Stage

SCHEMA = pa.schema(
    [
        ("row", pa.int64()),  # number of the raw row, from 0
        ("id", pa.string()),
        ("category", pa.string()),
        ("messages", pa.string()),  # JSON
        ("key", pa.string()),  # equal for equal prompts
    ]
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    prepare(options.settings, options.output)


def prepare(stage: Stage, output: Path) -> None:
    settings = stage.config
    start, stop = settings["start"], settings["stop"]
    name = settings.get("path") or settings.get("id") or "stdlib"
    raw = raw_rows.rows_of(settings, start, stop)
    check_digest(settings, raw, name)
    skips = Skips(settings["on_malformed"])
    rows = []
    for number, row in enumerate(raw, start):
        try:
            found = parse(row, number, settings["responses"])
        except MalformedRow as reason:
            skips.add(f"{name}: row {number + 1}", str(reason))
            continue
        rows.append(
            {
                "row": number,
                "id": found.id,
                "category": found.category,
                "messages": json.dumps(found.messages, ensure_ascii=False),
                "key": prompt_key(found.messages),
            }
        )
    tables.write(output, rows, SCHEMA, stage.record(skipped=skips.reasons))


def check_digest(settings: dict, raw: list[bytes], name: str) -> None:
    """Refuses rows that are not those the run was planned with."""
    if settings["kind"] == "hub":
        return  # pinned by its revision; a local folder by its digest when the run was planned
    found = raw_rows.range_digest(b"".join(map(raw_rows.row_hash, raw)))
    if found != settings["digest"]:
        raise DraftmillError(
            f"{name}: rows {settings['start'] + 1} to {settings['stop']} changed after this run was "
            "planned; start Snakemake again."
        )


if __name__ == "__main__":
    main()
