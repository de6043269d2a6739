"""Shards of the target's hidden states: hooks, one forward pass, states in the declared dtype.

A job loads the target once and may work through many shards; a shard's bytes do not depend on its company.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from draftmill import loading_share, shard_writer, spill, tables, target_manifest
from draftmill.capture import Capture
from draftmill.dtype_policy import Ledger
from draftmill.layers import check_layers
from draftmill.length_buckets import batch_tensors, batches_of
from draftmill.stage import Stage
from draftmill.target_passes import BACKENDS, Resident, Streamed, open_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse, nargs="+", help="per shard")
    parser.add_argument("--target", required=True, type=Path, help="the target's manifest.json")
    parser.add_argument("--tokens", required=True, type=Path, nargs="+", help="per shard")
    parser.add_argument("--output", required=True, type=Path, nargs="+", help="per shard")
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument("--loading", type=Path, help="JSON file for the seconds spent loading")
    options = parser.parse_args()
    shards = zip(options.settings, options.tokens, options.output, strict=True)
    extract(list(shards), options.target, options.backend, options.loading)


def extract(
    shards: list[tuple[Stage, Path, Path]],
    target: Path,
    backend: str = "auto",
    loading: Path | None = None,
) -> None:
    """shards: settings, tokens and output of each."""
    began = time.monotonic()
    manifest = target_manifest.read_manifest(target)
    layers = shards[0][0].config["layers"]["output_of"]
    for stage, tokens, _ in shards:
        stage.expect("target", target, manifest["fingerprint"])
        stage.expect("tokens", tokens, tables.record_of(tokens)["fingerprint"])
    check_layers(layers, manifest["layers"], "hidden_states.captures")
    ledger = Ledger()
    passes = open_target(manifest, backend, ledger)
    write_shards(passes, shards, manifest, ledger)
    outputs = [output for *_, output in shards]
    taken = time.monotonic() - began
    loading_share.write(loading, passes.seconds_loading, taken, passes.name, outputs)


def write_shards(
    passes: Resident | Streamed,
    shards: list[tuple[Stage, Path, Path]],
    manifest: dict,
    ledger: Ledger,
) -> None:
    """All shards through the opened target."""
    layers = shards[0][0].config["layers"]["output_of"]
    aside = spill.Spill(folder_of(shards[0][2])) if passes.streams else None
    capture = Capture(passes.model, layers, *([aside.put] if aside else []))
    border = manifest["angle_border"]
    batches = [batches_of_shard(stage, tokens, border) for stage, tokens, _ in shards]
    states = passes.run(
        partial(states_of, capture, batch) for of_shard in batches for batch in of_shard
    )
    progress = Progress()
    for (stage, tokens, output), of_shard in zip(shards, batches, strict=True):
        seen = Ledger(ledger)  # a shard's record does not depend on its company
        record = record_of(stage, manifest, tokens, seen)
        with shard_writer.new_shard(
            output, layers, manifest["hidden_size"], manifest["dtype"], record
        ) as shard:
            for batch in of_shard:
                found = next(states)
                found = [aside.get(state) for state in found] if aside else found
                append(shard, batch, found, seen, manifest["dtype"])
                progress.add(batch)
    capture.close()
    if aside:
        aside.close()


def folder_of(output: Path) -> Path:
    output.parent.mkdir(parents=True, exist_ok=True)
    return output.parent


def batches_of_shard(stage: Stage, tokens: Path, border: int | None) -> list[list[dict]]:
    settings, rows = stage.config, tables.read(tokens)
    return list(batches_of(rows, settings["batch_tokens"], settings["padding"], border))


def states_of(capture: Capture, batch: list[dict], model: nn.Module) -> list:
    return capture(*batch_tensors(batch, model.get_input_embeddings().weight.device))


def record_of(stage: Stage, manifest: dict, tokens: Path, ledger: Ledger) -> dict:
    rendering = json.loads(tables.record_of(tokens)["settings"])["config"]
    return stage.record(
        dtypes=ledger,
        target=manifest["fingerprint"],
        tokenizer=manifest["tokenizer"],
        chat_template=manifest["chat_template"],
        chat_template_kwargs=rendering["chat_template_kwargs"],
    )


def append(
    shard, batch: list[dict], states: list[torch.Tensor], ledger: Ledger, dtype: str
) -> None:
    for state in states:
        ledger.expect("hidden states as captured", state.dtype, dtype)
    states = [state.cpu() for state in states]
    for i, row in enumerate(batch):
        size = len(row["input_ids"])
        about = {k: row[k] for k in ("row", "turn", "category", "start")}
        kept = [state[i, :size] for state in states]
        shard.append(about, row["input_ids"], row["loss_mask"], kept)


class Progress:
    def __init__(self):
        self.began, self.tokens = time.monotonic(), 0

    def add(self, batch: list[dict]) -> None:
        self.tokens += sum(len(row["input_ids"]) for row in batch)
        rate = self.tokens / (time.monotonic() - self.began)
        print(f"{self.tokens} tokens, {rate:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
