"""One shard of the target's hidden states: hooks, one forward pass, states in the declared dtype."""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from draftmill import shard_writer, tables, target_model
from draftmill.capture import Capture
from draftmill.dtype_policy import Ledger
from draftmill.layers import check_layers
from draftmill.stage import Stage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--target", required=True, type=Path, help="the target's manifest.json")
    parser.add_argument("--tokens", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    extract(options.settings, options.target, options.tokens, options.output)


def extract(stage: Stage, target: Path, tokens: Path, output: Path) -> None:
    settings = stage.config
    manifest = target_model.read_manifest(target)
    stage.expect("target", target, manifest["fingerprint"])
    tokens_record = tables.record_of(tokens)
    stage.expect("tokens", tokens, tokens_record["fingerprint"])
    dtype, layers = manifest["dtype"], settings["layers"]["output_of"]
    check_layers(layers, manifest["layers"], "hidden_states.captures")
    rows = tables.read(tokens)
    model = target_model.load(manifest, dtype)
    ledger = Ledger()
    ledger.expect_module("target weights", model, dtype)
    capture = Capture(model, layers)
    record = stage.record(
        dtypes=ledger,
        target=manifest["fingerprint"],
        tokenizer=manifest["tokenizer"],
        chat_template=manifest["chat_template"],
        chat_template_kwargs=json.loads(tokens_record["settings"])["config"][
            "chat_template_kwargs"
        ],
    )
    began, done = time.monotonic(), 0
    with shard_writer.new_shard(output, layers, manifest["hidden_size"], dtype, record) as shard:
        for batch in batches_of(rows, settings["batch_tokens"], settings["padding"]):
            states = capture(*batch_tensors(batch, model.device))
            for state in states:
                ledger.expect("hidden states as captured", state.dtype, dtype)
            for i, row in enumerate(batch):
                size = len(row["input_ids"])
                kept = [state[i, :size].cpu() for state in states]
                about = {k: row[k] for k in ("row", "turn", "category", "start")}
                shard.append(about, row["input_ids"], row["loss_mask"], kept)
                done += size
            print(f"{done} tokens, {done / (time.monotonic() - began):.0f} tokens/s", flush=True)


def batches_of(rows: list[dict], batch_tokens: int, padding: str) -> Iterator[list[dict]]:
    """Rows in batches of at most `batch_tokens`: of one length each where padding is "none", else
    sorted by length, so that little is padded."""
    groups: dict[int, list[dict]] = defaultdict(list)
    for row in sorted(rows, key=lambda r: (len(r["input_ids"]), r["row"], r["turn"])):
        groups[len(row["input_ids"]) if padding == "none" else 0].append(row)
    for group in groups.values():
        batch: list[dict] = []
        for row in group:  # lengths ascend, so the new row sets the padded length
            if batch and (len(batch) + 1) * len(row["input_ids"]) > batch_tokens:
                yield batch
                batch = []
            batch.append(row)
        yield batch


def batch_tensors(batch: list[dict], device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ids and mask [batch, tokens], padded on the right (safe for causal attention); no mask where
    nothing is padded."""
    longest = len(batch[-1]["input_ids"])
    ids = [r["input_ids"] + [0] * (longest - len(r["input_ids"])) for r in batch]
    mask = [[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in batch]
    padded = len(batch[0]["input_ids"]) < longest
    ids, mask = (torch.tensor(x, device=device) for x in (ids, mask))
    return ids, mask if padded else None


if __name__ == "__main__":
    main()
