"""Embedding, norm and head of a checkpoint with Kimi-K2.5's real size: under 3 seconds and 1 GB.

    python benchmarks/find_parts.py [--check]

The index has its about 208,000 names; the files have true headers and no content (they are sparse), so that nothing but
index and headers can be read. What a process does before (imports) is not counted in the time, but in the memory.
"""

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from draftmill import checkpoint_files, target_parts
from draftmill.checkpoint_names import Conversion
from draftmill.target_structure import model_of

CONFIG = Path(__file__).resolve().parents[1] / "configs/targets/kimi-k2.5.config.json"
SECONDS, GIGABYTES = 3.0, 1.0
LAYERS, EXPERTS, FILES = 61, 384, 64
HIDDEN, INNER, VOCAB = 7168, 2048, 163840
ATTENTION = {
    "q_a_proj.weight": [1536, HIDDEN],
    "q_a_layernorm.weight": [1536],
    "q_b_proj.weight": [12288, 1536],
    "kv_a_proj_with_mqa.weight": [576, HIDDEN],
    "kv_a_layernorm.weight": [512],
    "kv_b_proj.weight": [16384, 512],
    "o_proj.weight": [HIDDEN, 8192],
}
SIZES = {"BF16": 2, "I32": 4, "F32": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="fail above the limits")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        names = write_checkpoint(Path(folder))
        began = time.perf_counter()
        parts = find(Path(folder))
        seconds = time.perf_counter() - began
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{names} names: {seconds:.2f} s, {gigabytes:.2f} GB at most in this process")
    print(f"embedding {parts.embedding}, head {parts.head}")
    if options.check and (seconds > SECONDS or gigabytes > GIGABYTES):
        sys.exit("finding takes more than its limits")


def find(folder: Path) -> target_parts.Parts:
    model = model_of({"checkpoint": str(folder), "trust_remote_code": False})
    return target_parts.find(folder, model, Conversion(model))


def tensors() -> Iterator[tuple[int, str, str, list[int]]]:
    """file number, name, dtype and shape of every tensor of the text model."""
    top = "language_model."
    yield FILES - 2, f"{top}lm_head.weight", "BF16", [VOCAB, HIDDEN]
    yield FILES - 2, f"{top}model.embed_tokens.weight", "BF16", [VOCAB, HIDDEN]
    yield FILES - 2, f"{top}model.norm.weight", "BF16", [HIDDEN]
    for layer in range(LAYERS):
        at = f"{top}model.layers.{layer}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield layer, at + norm, "BF16", [HIDDEN]
        for name, shape in ATTENTION.items():
            yield layer, f"{at}self_attn.{name}", "BF16", shape
        yield from mlp(layer, f"{at}mlp.")


def mlp(layer: int, at: str) -> Iterator[tuple[int, str, str, list[int]]]:
    projections = {
        "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN),
        "down_proj": (HIDDEN, INNER),
    }
    if layer == 0:
        for name, (rows, columns) in projections.items():
            yield layer, f"{at}{name}.weight", "BF16", [rows * 9, columns]
        return
    yield layer, f"{at}gate.weight", "BF16", [EXPERTS, HIDDEN]
    yield layer, f"{at}gate.e_score_correction_bias", "F32", [EXPERTS]
    for name, (rows, columns) in projections.items():
        yield layer, f"{at}shared_experts.{name}.weight", "BF16", [rows, columns]
        for expert in range(EXPERTS):
            one = f"{at}experts.{expert}.{name}."
            yield layer, f"{one}weight_packed", "I32", [rows, columns // 8]
            yield layer, f"{one}weight_scale", "BF16", [rows, columns // 32]
            yield layer, f"{one}weight_shape", "I32", [2]


def write_checkpoint(folder: Path) -> int:
    """config.json, index and sparse files; returns the number of names."""
    shutil.copy(CONFIG, folder / "config.json")
    headers: dict[int, dict] = defaultdict(dict)
    ends: dict[int, int] = defaultdict(int)
    weight_map = {}
    for number, name, dtype, shape in tensors():
        size = SIZES[dtype]
        for length in shape:
            size *= length
        offsets = [ends[number], ends[number] + size]
        headers[number][name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        ends[number] += size
        weight_map[name] = file_name(number)
    for number, header in headers.items():
        text = json.dumps(header).encode()
        with open(folder / file_name(number), "wb") as file:
            file.write(len(text).to_bytes(checkpoint_files.HEADER_LENGTH_BYTES, "little") + text)
            file.truncate(checkpoint_files.HEADER_LENGTH_BYTES + len(text) + ends[number])
    (folder / checkpoint_files.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return len(weight_map)


def file_name(number: int) -> str:
    return f"model-{number + 1:05d}-of-{FILES:06d}.safetensors"


if __name__ == "__main__":
    main()
