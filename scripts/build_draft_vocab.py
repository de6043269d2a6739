"""The draft vocabulary: the most frequent tokens of the target's answers in the training sources."""

import argparse
from collections import Counter
from pathlib import Path

from draftmill import draft_vocab, tables
from draftmill.errors import DraftmillError
from draftmill.stage import Stage, combine
from draftmill.target_manifest import read_manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--target", required=True, type=Path, help="the target's manifest.json")
    parser.add_argument("--tokens", required=True, type=Path, help="the folder of all tokens")
    parser.add_argument(
        "--sources", required=True, nargs="+", help="training sources, as NAME:SHARDS"
    )
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    build(options.settings, options.target, options.tokens, options.sources, options.output)


def build(stage: Stage, target: Path, tokens: Path, sources: list[str], output: Path) -> None:
    manifest = read_manifest(target)
    stage.expect("target", target, manifest["fingerprint"])
    counts: Counter[int] = Counter()
    fingerprints = []
    for source in sources:
        files, combined = tables.of_source(tokens, source)
        fingerprints.append(combined)
        for file in files:
            for row in tables.read(file):
                pairs = zip(row["input_ids"], row["loss_mask"], strict=True)
                counts.update(token for token, kept in pairs if kept)
    stage.expect("tokens", tokens, combine(fingerprints))
    vocab = manifest["vocab_size"]
    size = stage.config["draft_vocab_size"] or vocab
    if size > vocab:
        raise DraftmillError(
            f"config: draft_vocab_size is {size}, but the target's vocabulary has {vocab} tokens."
        )
    if not counts:
        raise DraftmillError(f"{tokens}: the training sources hold no answer token.")
    left_out = {stage.config.get("mask_token_id")} if size < vocab else set()
    chosen = draft_vocab.most_frequent(counts, size, vocab, manifest["stop_ids"], left_out)
    total = sum(counts.values())
    coverage = sum(counts[token] for token in chosen) / total
    print(f"{size} of {vocab} tokens cover {coverage:.4%} of {total} answer tokens", flush=True)
    record = stage.record(coverage=coverage, tokens=total, distinct=len(counts))
    draft_vocab.save(output, chosen, vocab, record)


if __name__ == "__main__":
    main()
