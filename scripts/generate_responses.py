"""The target's own answers to one shard of prompts, as token ids, from the configured engine."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from draftmill import tables, target_manifest
from draftmill.generation import Task
from draftmill.rendering import CannotRender, renderer_of
from draftmill.skips import Skips
from draftmill.stage import Stage

SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),  # the end token included, if there is one
        ("finish_reason", pa.string()),  # stop | length
    ]
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--target", required=True, type=Path, help="the target's manifest.json")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--engine", type=json.loads, default={}, help="how it is reached, as JSON")
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    generate(options.settings, options.target, options.prompts, options.engine, options.output)


def generate(stage: Stage, target: Path, prompts: Path, engine: dict, output: Path) -> None:
    settings = stage.config
    manifest = target_manifest.read_manifest(target)
    stage.expect("target", target, manifest["fingerprint"])
    stage.expect("prompts", prompts, tables.record_of(prompts)["fingerprint"])
    renderer = renderer_of(manifest, settings["chat_template_kwargs"])
    limit = target_manifest.length_limit(manifest, settings["max_length"])
    skips = Skips(settings["on_malformed"])

    def where(row: int) -> str:
        return f"{prompts}: row {row + 1}"

    def skip(row: int, reason: str) -> None:
        skips.add(where(row), reason)

    rendered: dict[int, list[int]] = {}
    for row in tables.read(prompts):
        try:
            ids = renderer.prompt_ids(json.loads(row["messages"]))
        except CannotRender as error:
            skip(row["row"], str(error))
            continue
        if len(ids) + settings["max_new_tokens"] > limit:
            skip(
                row["row"],
                f"the prompt has {len(ids)} tokens, which with max_new_tokens: "
                f"{settings['max_new_tokens']} exceeds the context of {limit}",
            )
            continue
        rendered[row["row"]] = ids
    task = Task(rendered, settings, manifest, renderer.tokenizer, where, skip, engine)
    answers, details = engine_of(settings["backend"])(task)
    rows = [{"row": row, "prompt_ids": rendered[row], **answers[row]} for row in sorted(answers)]
    tokens = sum(len(row["response_ids"]) for row in rows)
    # sorted: a server refuses rows in the order in which it comes to them
    record = stage.record(skipped=sorted(skips.reasons), tokens=tokens, **details)
    tables.write(output, rows, SCHEMA, record)


def engine_of(backend: str) -> Callable[[Task], tuple[dict[int, dict], dict]]:
    """The engine's function; only what is used is imported."""
    if backend == "openai":
        from draftmill.openai_engine import generate
    else:
        from draftmill.transformers_engine import generate
    return generate


if __name__ == "__main__":
    main()
