"""The target's own answers to one shard of prompts, as token ids, in the dtype of the policy."""

import argparse
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import torch
from transformers import GenerationConfig

from draftmill import tables, target_manifest, target_model, target_tokenizer
from draftmill.dtype_policy import Ledger
from draftmill.rendering import CannotRender, Renderer
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
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    generate(options.settings, options.target, options.prompts, options.output)


def generate(stage: Stage, target: Path, prompts: Path, output: Path) -> None:
    settings = stage.config
    manifest = target_manifest.read_manifest(target)
    stage.expect("target", target, manifest["fingerprint"])
    stage.expect("prompts", prompts, tables.record_of(prompts)["fingerprint"])
    tokenizer = target_tokenizer.tokenizer_of(manifest)
    renderer = Renderer(tokenizer, settings["chat_template_kwargs"], manifest["stop_ids"])
    limit = target_manifest.length_limit(manifest, settings["max_length"])
    skips = Skips(settings["on_malformed"])
    rendered: dict[int, list[int]] = {}
    for row in tables.read(prompts):
        where = f"{prompts}: row {row['row'] + 1}"
        try:
            ids = renderer.prompt_ids(json.loads(row["messages"]))
        except CannotRender as error:
            skips.add(where, str(error))
            continue
        if len(ids) + settings["max_new_tokens"] > limit:
            skips.add(
                where,
                f"the prompt has {len(ids)} tokens, which with max_new_tokens: "
                f"{settings['max_new_tokens']} exceeds the context of {limit}",
            )
            continue
        rendered[row["row"]] = ids
    ledger = Ledger()
    model = target_model.load(manifest, manifest["dtype"], ledger)
    model.generation_config = own_generation_config(settings, manifest["stop_ids"], tokenizer)
    torch.manual_seed(shard_seed(settings))
    answers = dict(answer_all(model, rendered, settings))
    rows = [{"row": row, "prompt_ids": rendered[row], **answers[row]} for row in sorted(answers)]
    tokens = sum(len(row["response_ids"]) for row in rows)
    record = stage.record(dtypes=dict(ledger), skipped=skips.reasons, tokens=tokens)
    tables.write(output, rows, SCHEMA, record)


def shard_seed(settings: dict) -> int:
    """A seed of this shard's own, so that shards do not sample alike."""
    text = f"{settings.get('seed', 0)}/{settings.get('stream', '')}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def own_generation_config(settings: dict, stop_ids: list[int], tokenizer) -> GenerationConfig:
    """Exactly what the configuration says. The checkpoint's own generation_config (repetition penalty,
    top_k, suppressed tokens) would make "greedy" text that greedy verification never emits."""
    sampled = settings["temperature"] > 0
    pad_id = stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    sampling = {k: settings[k] for k in ("temperature", "top_p")} | {"top_k": 0} if sampled else {}
    return GenerationConfig(
        max_new_tokens=settings["max_new_tokens"],
        do_sample=sampled,
        eos_token_id=stop_ids,
        pad_token_id=pad_id,
        **sampling,
    )


def answer_all(model, prompts: dict, settings: dict) -> Iterator:
    """Yields (row, {"response_ids", "finish_reason"}) for every prompt, with progress.

    The model's generation_config decides how it answers.
    """
    began, done = time.monotonic(), 0
    batches = list(batches_of(prompts, settings["batch_size"], settings["padding"]))
    for number, rows in enumerate(batches, 1):
        for row, answer in zip(
            rows,
            answer_batch(model, [prompts[r] for r in rows]),
            strict=True,
        ):
            done += len(answer["response_ids"])
            yield row, answer
        seconds = time.monotonic() - began
        left = seconds / number * (len(batches) - number)
        print(
            f"batch {number}/{len(batches)}: {done / seconds:.0f} tokens/s, {left:.0f} s left",
            flush=True,
        )


def batches_of(prompts: dict[int, list[int]], size: int, padding: str) -> Iterator[list[int]]:
    """Rows in batches: of equal prompt length where padding is "none", else of similar length."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for row in sorted(prompts):
        by_length[len(prompts[row]) if padding == "none" else 0].append(row)
    for _, rows in sorted(by_length.items()):
        rows.sort(key=lambda row: (len(prompts[row]), row))
        yield from (rows[i : i + size] for i in range(0, len(rows), size))


@torch.inference_mode()
def answer_batch(model, prompts: list[list[int]]) -> Iterator[dict]:
    """Answers of one batch, left-padded where lengths differ."""
    config = model.generation_config
    longest = max(map(len, prompts))
    ids = torch.tensor([[config.pad_token_id] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device))
    for row in out[:, longest:].tolist():
        end = next((i for i, token in enumerate(row) if token in config.eos_token_id), None)
        yield {
            "response_ids": row if end is None else row[: end + 1],
            "finish_reason": "length" if end is None else "stop",
        }


if __name__ == "__main__":
    main()
