"""Small Parquet tables (prompts, responses, tokens) that carry their record."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.atomic import atomic_path
from draftmill.errors import damaged
from draftmill.stage import combine


def write(path: str | Path, rows: list[dict], schema: pa.Schema, record: dict) -> None:
    """Writes rows with page checksums; the record goes to the footer."""
    footer = {"draftmill": json.dumps(record, sort_keys=True), "complete": "1"}
    table = pa.Table.from_pylist(rows, schema=schema.with_metadata(footer))
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def record_of(path: str | Path) -> dict:
    """The record in a table's footer; DraftmillError where the file is damaged."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
        return json.loads(metadata[b"draftmill"])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise damaged(path, error) from None


def read(path: str | Path) -> list[dict]:
    """The rows, every page checked against its checksum; DraftmillError where one is damaged."""
    try:
        return pq.read_table(path, page_checksum_verification=True).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, error) from None


def of_source(folder: Path, source: str) -> tuple[list[Path], str]:
    """The shards of a source, named NAME:SHARDS, and the combined fingerprint that they carry."""
    name, shards = source.rsplit(":", 1)
    files = [folder / name / f"{i:05d}.parquet" for i in range(int(shards))]
    return files, combine(record_of(file)["fingerprint"] for file in files)
