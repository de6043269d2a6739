"""Rate of generate_responses against bare model.generate on the same batches: at least 0.95.

    python benchmarks/generate.py [--rounds 3] [--target results/smollm2/target/manifest.json]

Both run in turn in one process, on one thread; the ratio of the medians is printed and, with --check,
tested.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from draftmill import target_manifest, target_model, target_tokenizer
from draftmill.dtype_policy import Ledger
from draftmill.rendering import Renderer
from draftmill.stdlib_prompts import stdlib_prompts
from draftmill.transformers_engine import answer_all, batches_of, own_generation_config

SETTINGS = {"max_new_tokens": 64, "batch_size": 16, "temperature": 0.0, "padding": "left"}
PROMPTS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path("results/smollm2/target/manifest.json")
    parser.add_argument("--target", type=Path, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="fail below 0.95")
    options = parser.parse_args()
    torch.set_num_threads(1)
    manifest = target_manifest.read_manifest(options.target)
    tokenizer = target_tokenizer.tokenizer_of(manifest)
    renderer = Renderer(tokenizer, {}, manifest["stop_ids"])
    texts = stdlib_prompts()[:PROMPTS]
    prompts = {
        i: renderer.prompt_ids([{"role": "user", "content": text}]) for i, text in enumerate(texts)
    }
    model = target_model.load(manifest, manifest["dtype"], Ledger())
    model.generation_config = own_generation_config(SETTINGS, manifest["stop_ids"], tokenizer)
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    tokens: dict[str, int] = {}
    for _ in range(options.rounds):
        began = time.perf_counter()
        answers = dict(answer_all(model, prompts, SETTINGS))
        seconds["ours"].append(time.perf_counter() - began)
        tokens["ours"] = sum(len(a["response_ids"]) for a in answers.values())
        began = time.perf_counter()
        tokens["bare"] = bare(model, prompts, manifest["stop_ids"])
        seconds["bare"].append(time.perf_counter() - began)
    rates = {name: tokens[name] / statistics.median(times) for name, times in seconds.items()}
    ratio = rates["ours"] / rates["bare"]
    print(
        f"ours {rates['ours']:.0f} tokens/s, bare {rates['bare']:.0f} tokens/s, ratio {ratio:.3f}"
    )
    if options.check and ratio < 0.95:
        sys.exit("generation is below 0.95 of the bare rate")


@torch.inference_mode()
def bare(model, prompts: dict[int, list[int]], stop_ids: list[int]) -> int:
    """model.generate and nothing else; the number of tokens up to the end of each answer."""
    count = 0
    for rows in batches_of(prompts, SETTINGS["batch_size"], SETTINGS["padding"]):
        longest = max(len(prompts[row]) for row in rows)
        pads = [longest - len(prompts[row]) for row in rows]
        pairs = list(zip(pads, rows, strict=True))
        ids = torch.tensor([[0] * pad + prompts[row] for pad, row in pairs])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=SETTINGS["max_new_tokens"],
            do_sample=False,
            eos_token_id=stop_ids,
            pad_token_id=stop_ids[0],
        )
        for row in out[:, longest:].tolist():
            end = next((i for i, token in enumerate(row) if token in stop_ids), len(row) - 1)
            count += end + 1
    return count


if __name__ == "__main__":
    main()
