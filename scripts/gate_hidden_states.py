"""The gate after extraction: the stored states give the model's own next tokens, or the run stops.

Like extraction, a job loads the target once and may work through many shards.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch

from draftmill import causality, layer_inputs, loading_share, target_head, target_manifest
from draftmill.atomic import sha256_of, write_json
from draftmill.devices import best_device
from draftmill.dtype_policy import Ledger
from draftmill.errors import DraftmillError
from draftmill.greedy_text import greedy_share
from draftmill.loaded_parts import check_loaded
from draftmill.shard_reader import Shard
from draftmill.stage import Stage
from draftmill.state_checks import Tally
from draftmill.state_contents import check_contents
from draftmill.tables import read as read_table
from draftmill.target_passes import BACKENDS, open_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse, nargs="+", help="per shard")
    parser.add_argument("--target", required=True, type=Path, help="the target's manifest.json")
    parser.add_argument("--head", required=True, type=Path)
    parser.add_argument("--tokens", required=True, type=Path, nargs="+", help="per shard")
    parser.add_argument("--hidden-states", required=True, type=Path, nargs="+", help="per shard")
    parser.add_argument("--output", required=True, type=Path, nargs="+", help="per shard")
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument("--loading", type=Path, help="JSON file for the seconds spent loading")
    options = parser.parse_args()
    files = (options.settings, options.tokens, options.hidden_states, options.output)
    check(
        list(zip(*files, strict=True)),
        options.target,
        options.head,
        options.backend,
        options.loading,
    )


def check(
    shards: list[tuple[Stage, Path, Path, Path]],
    target: Path,
    head_file: Path,
    backend: str = "auto",
    loading: Path | None = None,
) -> None:
    """shards: settings, tokens, hidden states and output of each."""
    began = time.monotonic()
    manifest = target_manifest.read_manifest(target)
    ledger = Ledger()
    opened = [open_shard(stage, manifest, target, *files) for stage, *files, _ in shards]
    tensors = target_head.read(head_file, shards[0][0])
    head = target_head.TargetHead(manifest, tensors)
    ledger.expect("target head weights", head.dtype, manifest["dtype"])
    head = head.to(best_device())
    passes = open_target(manifest, backend, ledger)
    check_loaded(passes.model, tensors, head_file)
    samples = [
        (stage, shard, index)
        for (stage, *_), shard in zip(shards, opened, strict=True)
        for index in layer_inputs.picked_samples(shard, stage.config["rows"])
    ]
    watch = layer_inputs.LayerInputs(passes.model, opened[0].layers)
    halves = causality.half_passes(watch, opened, manifest["angle_border"])
    wholes = [partial(layer_inputs.own_pass, watch, shard, index) for _, shard, index in samples]
    own = passes.run(halves + wholes)
    if halves:
        causality.check_causal(target, next(own), next(own))
    for (stage, _, states, output), shard in zip(shards, opened, strict=True):
        tally = Tally(states, ledger)
        for _, of_shard, index in samples:
            if of_shard is shard:
                tally.add(shard, index, next(own), head)
        found = tally.checked(stage.config)
        found["greedy"] = greedy(stage, shard, head)
        counts = {"samples": len(shard.samples), "tokens": shard.footer["tokens"]}
        found |= counts | {"sha256": sha256_of(states), "layers": shard.footer["layers"]}
        record = stage.record(dtypes=dict(ledger))
        write_json(output, found | {"record": record, "fingerprint": stage.fingerprint})
    watch.close()
    outputs = [output for *_, output in shards]
    taken = time.monotonic() - began
    loading_share.write(loading, passes.seconds_loading, taken, passes.name, outputs)


def open_shard(stage: Stage, manifest: dict, target: Path, tokens: Path, states: Path) -> Shard:
    """A shard whose contents are those of its tokens."""
    stage.expect("target", target, manifest["fingerprint"])
    shard = Shard(states, manifest["dtype"])
    stage.expect("hidden_states", states, shard.fingerprint)
    check_contents(shard, read_table(tokens))
    return shard


def greedy(stage: Stage, shard: Shard, head: torch.nn.Module) -> float | None:
    """The greedy share of a shard, where its source is measured along the target's greedy text."""
    if not stage.config["greedy"]:
        return None
    found, wanted = greedy_share(shard, head), stage.config["min_greedy"]
    if found is not None and found < wanted:
        raise DraftmillError(
            f"{shard.path}: only {found:.1%} of the answers' tokens are what the target would emit "
            f"greedily, expected at least {wanted:.1%}; acceptance measured along such text is not the "
            "target's; let the target generate the answers of test and validation sources, or, where it did "
            "and its cached and full passes differ in this dtype, set target.dtype: float32."
        )
    return found


if __name__ == "__main__":
    main()
