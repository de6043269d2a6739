"""The gate after extraction: the stored states give the model's own next tokens, or the run stops."""

import argparse
import random
from pathlib import Path

import torch

from draftmill import shard_layout, target_head, target_model
from draftmill.atomic import sha256_of, write_json
from draftmill.devices import best_device
from draftmill.dtype_policy import Ledger
from draftmill.errors import DraftmillError
from draftmill.shard_reader import Shard
from draftmill.stage import Stage
from draftmill.tables import read as read_table

ROWS_PER_SAMPLE = 16  # positions compared in one sample, so that the rows spread over several


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--target", required=True, type=Path, help="the target's manifest.json")
    parser.add_argument("--head", required=True, type=Path)
    parser.add_argument("--tokens", required=True, type=Path)
    parser.add_argument("--hidden-states", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    check(
        options.settings,
        options.target,
        options.head,
        options.tokens,
        options.hidden_states,
        options.output,
    )


def check(
    stage: Stage, target: Path, head_file: Path, tokens: Path, states: Path, output: Path
) -> None:
    manifest = target_model.read_manifest(target)
    stage.expect("target", target, manifest["fingerprint"])
    shard = Shard(states, manifest["dtype"])
    stage.expect("hidden_states", states, shard.fingerprint)
    check_contents(shard, read_table(tokens))
    head = target_head.TargetHead(manifest, target_head.read(head_file, stage))
    ledger = Ledger()
    ledger.expect("target head weights", head.dtype, manifest["dtype"])
    found = agreement(shard, manifest, head.to(best_device()), stage.config["rows"], ledger)
    if found["agreement"] is not None and found["agreement"] < stage.config["min_agreement"]:
        raise DraftmillError(
            f"{states}: on {found['rows']} rows, the head on the stored states agrees with the model's "
            f"own argmax in {found['agreement']:.1%}, expected at least "
            f"{stage.config['min_agreement']:.1%}; the usual causes are states stored after the final "
            "norm, a layer off by one, padding on the left, or another target."
        )
    found["greedy"] = greedy_share(shard, head) if stage.config["greedy"] else None
    if found["greedy"] is not None and found["greedy"] < stage.config["min_greedy"]:
        raise DraftmillError(
            f"{states}: only {found['greedy']:.1%} of the answers' tokens are what the target would emit "
            f"greedily, expected at least {stage.config['min_greedy']:.1%}; acceptance measured along "
            "such text is not the target's; let the target generate the answers of test and validation "
            "sources."
        )
    counts = {"samples": len(shard.samples), "tokens": shard.footer["tokens"]}
    record = stage.record(dtypes=dict(ledger))
    found |= counts | {"sha256": sha256_of(states), "layers": shard.footer["layers"]}
    write_json(output, found | {"record": record, "fingerprint": stage.fingerprint})


def check_contents(shard: Shard, rows: list[dict]) -> None:
    """Every state finite, every id and mask equal to the tokens'."""
    expected = {(row["row"], row["turn"]): row for row in rows}
    columns = shard.file.schema_arrow.names
    for index, sample in enumerate(shard.samples):
        row = expected.pop((sample["row"], sample["turn"]), None)
        found = shard.read(index, columns)
        ids, mask = found.pop("input_ids").tolist(), found.pop("loss_mask").long().tolist()
        if row is None or ids != row["input_ids"] or mask != row["loss_mask"]:
            raise DraftmillError(
                f"{shard.path}: sample {index} (row {sample['row'] + 1}) does not hold the ids and "
                "mask of its tokens; delete it and start Snakemake again."
            )
        for name, state in found.items():
            if not torch.isfinite(state).all():
                raise DraftmillError(
                    f"{shard.path}: {name} of sample {index} (row {sample['row'] + 1}) holds values "
                    "that are not finite; the target overflowed in this dtype or its weights are "
                    "damaged."
                )
    if expected:
        raise DraftmillError(f"{shard.path}: lacks {len(expected)} samples of its tokens.")


@torch.inference_mode()
def agreement(shard: Shard, manifest: dict, head, rows: int, ledger: Ledger) -> dict:
    """Compares argmaxes on rows spread over the shard; unpadded forward passes of the whole model."""
    order = list(range(len(shard.samples)))
    random.Random(0).shuffle(order)
    order = sorted(order[: -(-rows // ROWS_PER_SAMPLE)])
    model = target_model.load(manifest, manifest["dtype"])
    ledger.expect_module("target weights", model, manifest["dtype"])
    equal = total = 0
    for index in order:
        found = shard.read(index, ["input_ids", shard_layout.LAST])
        ids = found["input_ids"][None].to(model.device)
        size = min(ROWS_PER_SAMPLE, ids.shape[1])
        picked = torch.linspace(0, ids.shape[1] - 1, size).long()
        own = model(input_ids=ids, use_cache=False).logits[0, picked].argmax(-1)
        states = found[shard_layout.LAST][None, picked].to(model.device)
        ledger.expect("hidden states as read", states.dtype, manifest["dtype"])
        equal += int((head(states)[0].argmax(-1) == own).sum())
        total += size
    return {"agreement": equal / total if total else None, "rows": total}


@torch.inference_mode()
def greedy_share(shard: Shard, head) -> float | None:
    """The share of answer tokens, the first excepted, that are the argmax before them."""
    equal = total = 0
    for index, sample in enumerate(shard.samples):
        found = shard.read(index, ["input_ids", shard_layout.LAST])
        states = found[shard_layout.LAST][None, sample["start"] : -1]
        expected = found["input_ids"][sample["start"] + 1 :]
        if len(expected):
            device = head.lm_head.weight.device
            equal += int((head(states.to(device))[0].argmax(-1).cpu() == expected).sum())
            total += len(expected)
    return equal / total if total else None


if __name__ == "__main__":
    main()
