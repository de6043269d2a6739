"""Token ids and loss mask of one shard: what the target's hidden states are taken on."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from draftmill import tables, target_manifest
from draftmill.errors import DraftmillError
from draftmill.rendering import CannotRender, Renderer, Sample, renderer_of
from draftmill.skips import Skips
from draftmill.stage import Stage

SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("turn", pa.int32()),
        ("id", pa.string()),
        ("category", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("start", pa.int32()),  # index of the last answer's first token
        ("finish_reason", pa.string()),  # stop | length | given
    ]
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--target", required=True, type=Path, help="the target's manifest.json")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--responses", type=Path, nargs="?", help="the target's own answers")
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    tokenize(options.settings, options.target, options.prompts, options.responses, options.output)


def tokenize(
    stage: Stage, target: Path, prompts: Path, responses: Path | None, output: Path
) -> None:
    settings = stage.config
    manifest = target_manifest.read_manifest(target)
    stage.expect("target", target, manifest["fingerprint"])
    stage.expect("prompts", prompts, tables.record_of(prompts)["fingerprint"])
    answers, skipped = None, list(tables.record_of(prompts)["skipped"])
    if responses:
        record = tables.record_of(responses)
        stage.expect("responses", responses, record["fingerprint"])
        answers = {row["row"]: row for row in tables.read(responses)}
        skipped += record["skipped"]
    renderer = renderer_of(manifest, settings["chat_template_kwargs"])
    limit = target_manifest.length_limit(manifest, settings["max_length"])
    skips = Skips(settings["on_malformed"])
    rows, cut = [], 0
    for row in tables.read(prompts):
        if answers is not None and row["row"] not in answers:
            continue  # its prompt was too long, and counted there
        where = f"{prompts}: row {row['row'] + 1}"
        found = answers[row["row"]] if answers is not None else None
        reason = "given" if found is None else found["finish_reason"]
        if reason == "length":
            cut += 1
            if not keep_truncated(settings["truncated"], where):
                continue
        try:
            samples = list(samples_of(renderer, json.loads(row["messages"]), found, where, skips))
        except CannotRender as error:
            skips.add(where, str(error))
            continue
        for sample in samples:
            if len(sample.ids) > limit:
                skips.add(where, f"has {len(sample.ids)} tokens, but the context is {limit}")
                continue
            rows.append(row_of(row, sample, reason))
    if cut:
        print(
            f"{output}: {cut} answers were cut by the length limit (finish_reason length); "
            f"truncated: {settings['truncated']}",
            flush=True,
        )
    tokens = sum(len(row["input_ids"]) for row in rows)
    record = stage.record(skipped=skipped + skips.reasons, truncated=cut, tokens=tokens)
    tables.write(output, rows, SCHEMA, record)


def keep_truncated(policy: str, where: str) -> bool:
    if policy == "stop":
        raise DraftmillError(
            f"{where}: the answer was cut by the length limit; raise responses.max_new_tokens, or set "
            "responses.truncated to keep or skip."
        )
    return policy == "keep"


def samples_of(
    renderer: Renderer, messages: list[dict], found: dict | None, where: str, skips: Skips
) -> Iterator[Sample]:
    if found is None:
        yield from renderer.samples(messages)
        return
    body = found["response_ids"][:-1] if found["finish_reason"] == "stop" else found["response_ids"]
    if not body:
        skips.leave_out(where, "an empty response: the target ended at once")
        return
    yield renderer.answered(messages, found["prompt_ids"], found["response_ids"])


def row_of(row: dict, sample: Sample, reason: str) -> dict:
    return {
        "row": row["row"],
        "turn": sample.turn,
        "id": row["id"],
        "category": row["category"],
        "input_ids": sample.ids,
        "loss_mask": sample.mask,
        "start": sample.start,
        "finish_reason": reason,
    }


if __name__ == "__main__":
    main()
