"""extract_hidden_states against the bare forward pass of the same batches: at most 1.05 of its CPU time; and
streamed extraction against resident extraction, loading included: at most 1.25 of its time.

    python benchmarks/extract.py [--rounds 3] [--tokens 20000] [--target results/smollm2/target/manifest.json]
    python benchmarks/extract.py --streamed --tokens 100000

Both sides run in turn in one process, on one thread; the ratio of the medians is printed and, with --check, tested.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import extract_hidden_states
from draftmill import tables, target_manifest
from draftmill.dtype_policy import Ledger
from draftmill.length_buckets import batch_tensors
from draftmill.stage import Stage, canonical
from draftmill.target_passes import Resident
from draftmill.target_structure import text_decoder
from tokenize_conversations import SCHEMA

LIMITS = {"bare": 1.05, "streamed": 1.25}
LENGTHS = (64, 90, 128, 171, 200, 256)  # of conversations, in turn
BATCH_TOKENS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    default = Path("results/smollm2/target/manifest.json")
    parser.add_argument("--target", type=Path, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--streamed", action="store_true", help="compare the backends")
    parser.add_argument("--check", action="store_true", help="fail above the limit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        shard = make_shard(options.target, options.tokens, Path(folder))
        compare = backends if options.streamed else against_bare
        name, ours, other = compare(shard, options.target)
        ratio = ratio_of(ours, other, options.rounds)
    print(f"{name}: {ratio:.3f} (at most {LIMITS[name]})")
    if options.check and ratio > LIMITS[name]:
        sys.exit("extraction is slower than its limit")


def make_shard(target: Path, tokens: int, folder: Path) -> tuple[Stage, Path, Path]:
    """Settings, tokens and output of one shard of about `tokens` tokens of random text."""
    manifest = target_manifest.read_manifest(target)
    generator = torch.Generator().manual_seed(0)
    rows, done = [], 0
    while done < tokens:
        size = LENGTHS[len(rows) % len(LENGTHS)]
        ids = torch.randint(10, manifest["vocab_size"] - 10, (size,), generator=generator).tolist()
        about = {"row": len(rows), "turn": 1, "id": str(len(rows)), "category": "all"}
        rows.append(
            about
            | {"input_ids": ids, "loss_mask": [1] * size, "start": 0, "finish_reason": "given"}
        )
        done += size
    inputs = {"target": manifest["fingerprint"]}
    made = Stage.parse(settings("tokenize_conversations", {"chat_template_kwargs": {}}, inputs))
    path = folder / "tokens.parquet"
    tables.write(path, rows, pa.schema(SCHEMA), made.record(skipped=[]))
    depth = manifest["layers"]
    slice_ = {
        "layers": {"output_of": [1, depth // 2 - 1, depth - 4]},
        "batch_tokens": BATCH_TOKENS,
        "padding": "right",
    }
    stage = settings("extract_hidden_states", slice_, inputs | {"tokens": made.fingerprint})
    return Stage.parse(stage), path, folder / "states.parquet"


def settings(rule: str, slice_: dict, inputs: dict) -> str:
    return canonical({"rule": rule, "code": "", "packages": "", "config": slice_, "inputs": inputs})


def against_bare(shard: tuple[Stage, Path, Path], target: Path) -> tuple[str, Callable, Callable]:
    """Extraction and the decoder's forward, both with the target loaded."""
    manifest, ledger = target_manifest.read_manifest(target), Ledger()
    passes = Resident(manifest, ledger)
    decoder = text_decoder(passes.model)
    batches = extract_hidden_states.batches_of_shard(*shard[:2], manifest["angle_border"])

    @torch.inference_mode()
    def bare() -> None:
        for batch in batches:
            ids, mask = batch_tensors(batch, decoder.device)
            decoder(input_ids=ids, attention_mask=mask, use_cache=False)

    def ours() -> None:
        extract_hidden_states.write_shards(passes, [shard], manifest, ledger)

    return "bare", ours, bare


def backends(shard: tuple[Stage, Path, Path], target: Path) -> tuple[str, Callable, Callable]:
    """Whole jobs of both backends, loading included."""

    def job(backend: str) -> Callable[[], None]:
        return lambda: extract_hidden_states.extract([shard], target, backend)

    return "streamed", job("streamed"), job("resident")


def ratio_of(ours: Callable, other: Callable, rounds: int) -> float:
    """The ratio of the medians of CPU time; wall times are printed beside them."""
    seconds: dict[str, list[float]] = {"ours": [], "other": []}
    for turn in range(rounds + 1):
        for name, run in (("other", other), ("ours", ours)):
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            took = time.process_time() - cpu
            print(f"{name}: CPU {took:.2f} s, wall {time.perf_counter() - wall:.2f} s", flush=True)
            if turn:  # the first round warms caches
                seconds[name].append(took)
    return statistics.median(seconds["ours"]) / statistics.median(seconds["other"])


if __name__ == "__main__":
    main()
