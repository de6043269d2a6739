"""The manifest of a source's hidden-state shards: what training and evaluation read first."""

import argparse
from pathlib import Path

from draftmill.atomic import write_json
from draftmill.errors import DraftmillError
from draftmill.shard_reader import Shard
from draftmill.stage import Stage, combine
from draftmill.target_manifest import read_manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--target", required=True, type=Path, help="the target's manifest.json")
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    index(options.settings, options.target, options.output)


def index(stage: Stage, target: Path, output: Path) -> None:
    """The shards stand beside the manifest."""
    dtype = read_manifest(target)["dtype"]
    entries = []
    for number in range(stage.config["shards"]):
        shard = Shard(output.parent / f"{number:05d}.parquet", dtype)
        entries.append(
            {
                "file": shard.path.name,
                "fingerprint": shard.fingerprint,
                "bytes": shard.path.stat().st_size,
                "samples": len(shard.samples),
                "tokens": shard.footer["tokens"],
            }
        )
    if combine(entry["fingerprint"] for entry in entries) != stage.inputs["hidden_states"]:
        raise DraftmillError(
            f"{output.parent}: its shards are not those that this run plans (one was edited, copied "
            "or made by other code or settings); delete the folder and start Snakemake again."
        )
    totals = {key: sum(entry[key] for entry in entries) for key in ("samples", "tokens", "bytes")}
    about = {"dtype": dtype, "hidden_size": shard.hidden, "layers": shard.footer["layers"]}
    carried = ("target", "tokenizer", "chat_template", "chat_template_kwargs", "dtypes")
    about |= {key: shard.footer["record"][key] for key in carried}
    record = stage.record(tokens=totals["tokens"])
    write_json(
        output,
        totals | about | {"shards": entries, "record": record, "fingerprint": stage.fingerprint},
    )


if __name__ == "__main__":
    main()
