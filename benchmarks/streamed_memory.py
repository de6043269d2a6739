"""Peak memory of streamed extraction: under 1.3 x the largest layer, plus activations and head.

    python benchmarks/streamed_memory.py [--family dense|experts] [--layers 4]

A model whose layers dominate is made in a temporary folder (about 250 MB a layer). One process passes a shard through it
streamed; another, with the whole model in memory, shows what activations take. Linux only.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from draftmill.capture import Capture
from draftmill.dtype_policy import Ledger
from draftmill.spill import Spill
from draftmill.target_passes import Resident, Streamed
from draftmill.target_structure import decoder_layers, output_head

LIMIT = 1.3
BATCHES, BATCH, TOKENS = 4, 4, 128
SHARED = {"vocab_size": 512, "max_position_embeddings": 512, "tie_word_embeddings": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--family", default="experts", choices=["dense", "experts"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--check", action="store_true", help="fail above the limit")
    parser.add_argument("--measure", nargs=2, metavar=("BACKEND", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        make(options.family, options.layers, 16, Path(folder))
        make(options.family, 2, 1, Path(folder) / "small")
        streamed, resident = (measured(b, folder) for b in ("streamed", "resident"))
    bound = LIMIT * streamed["layer"] + resident["activations"] + streamed["head"]
    print(
        f"{options.family}: largest layer {streamed['layer']:.0f} MB, activations "
        f"{resident['activations']:.0f} MB, head {streamed['head']:.0f} MB; peak {streamed['peak']:.0f} MB, at "
        f"most {bound:.0f} MB (the whole model, loaded: {resident['peak']:.0f} MB)"
    )
    if options.check and streamed["peak"] > bound:
        sys.exit("streamed extraction takes more memory than its limit")


def make(family: str, layers: int, scale: int, folder: Path) -> None:
    """A bf16 checkpoint; the experts of the mixture stand on disk one by one. Widths grow with `scale`."""
    torch.set_default_dtype(torch.bfloat16)
    common = SHARED | {"num_hidden_layers": layers, "num_attention_heads": 8}
    if family == "dense":
        config = LlamaConfig(hidden_size=128 * scale, intermediate_size=1024 * scale, **common)
        model = LlamaForCausalLM(config)
    else:
        sizes = {"hidden_size": 64 * scale, "moe_intermediate_size": 64 * scale, "head_dim": 64}
        config = Qwen3MoeConfig(
            num_experts=40, num_experts_per_tok=4, num_key_value_heads=4, **sizes, **common
        )
        model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="200MB")


def measured(backend: str, folder: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", backend, folder]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def measure(backend: str, folder: str) -> dict[str, float]:
    """MB: peak above what the process had before, and the parts that explain it."""
    kind = {"streamed": Streamed, "resident": Resident}[backend]
    run(kind(manifest_of(f"{folder}/small"), Ledger()), 1, folder)  # libraries load what they load
    before = memory("VmRSS")
    forget_peak()
    passes = kind(manifest_of(folder), Ledger())
    layers = decoder_layers(passes.model)
    largest = max(sum(p.nbytes for p in layer.parameters()) for layer in layers)
    run(passes, 1, folder)  # a resident model is mapped, and touched first here
    peak, loaded = memory("VmHWM"), memory("VmRSS")
    forget_peak()
    run(passes, BATCHES, folder)
    during = memory("VmHWM")
    return {
        "peak": max(peak, during) - before,
        "activations": during - loaded,
        "layer": largest / 1e6,
        "head": sum(p.nbytes for p in output_head(passes.model).parameters()) / 1e6,
    }


def manifest_of(folder: str) -> dict:
    return {"checkpoint": folder, "trust_remote_code": False, "dtype": "bfloat16"}


def run(passes: Streamed | Resident, count: int, folder: str) -> None:
    """Batches of random text through the target, their states put aside."""
    generator = torch.Generator().manual_seed(0)
    capture = Capture(passes.model, [0], Spill(Path(folder)).put)
    batches = [torch.randint(5, 500, (BATCH, TOKENS), generator=generator) for _ in range(count)]
    list(passes.run((lambda model, ids=ids: capture(ids, None)) for ids in batches))
    capture.close()


def memory(key: str) -> float:
    """A figure of /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1000


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (man 5 proc)


if __name__ == "__main__":
    main()
