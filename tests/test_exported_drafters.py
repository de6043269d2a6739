"""A drafter survives its export: a fresh process drafts from the files what this one drafts from memory."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftmill import algorithms, draft_vocab, drafter_files, target_head
from draftmill.dtype_policy import DTYPES, Ledger
from draftmill.state_dataset import StateDataset
from draftmill.target_manifest import read_manifest
from mini_road import MiniRoad
from workflow import environment, with_block_drafter

DRAFTERS = {"eagle3": "small", "dflash": "block"}
CASES = list(product(DRAFTERS, (256, 512), ("bfloat16", "float32")))  # 512 is the whole vocabulary
PROGRAM = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from draftmill import algorithms
torch.set_num_threads(1)
for folder in map(Path, sys.argv[1:]):
    algorithm = algorithms.load(folder.name.split("-")[0])
    model, given, found, logits = algorithm.load(folder, "cpu"), load_file(folder / "given"), {}, []
    model.lm_head.register_forward_hook(lambda m, a, out: logits.append(out.flatten()))
    for i in range(len(given) // 2):
        sample = {"input_ids": given[f"{i}/input_ids"], "aux": given[f"{i}/aux"]}
        found[f"drafts/{i}"] = algorithm.drafts(model, sample, 3)
    found["logits"] = torch.cat(logits)
    found |= {f"weight/{k}": v.clone() for k, v in model.state_dict().items()}
    save_file(found, folder / "found")
"""


def exported(config: dict, folder: Path, name: str, vocabulary: int, dtype: str) -> dict:
    """Exports a new drafter to the folder, with samples beside it; what it drafts from memory, and its weights."""
    drafter, algorithm = DRAFTERS[name], algorithms.load(name)
    config["drafters"][drafter]["draft_vocab_size"] = vocabulary
    road = MiniRoad(config)
    t2d, d2t, _ = draft_vocab.read(road.build_draft_vocab(drafter))
    stage, manifest = road.stage(f"train_{name}", drafter=drafter), read_manifest(road.target)
    layers = stage.config["layers"]["output_of"]
    data = StateDataset([road.states("judge", "manifest.json")], "bfloat16", layers)
    samples = [data[i] | {"aux": data[i]["aux"].to(DTYPES[dtype])} for i in range(len(data))]

    torch.manual_seed(0)
    shape = algorithm.config_of(stage.config, manifest, "cpu", len(d2t))
    tensors = target_head.read(road.head, stage)
    model = algorithm.new_drafter(shape, tensors, t2d, d2t, DTYPES[dtype]).eval()
    drafter_files.export(model, shape, dtype, folder, Ledger())
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda m, a, out: logits.append(out.flatten()))
    made = {f"drafts/{i}": algorithm.drafts(model, s, 3) for i, s in enumerate(samples)}
    given = {f"{i}/{k}": s[k] for i, s in enumerate(samples) for k in ("input_ids", "aux")}
    save_file(given, folder / "given")
    made["logits"] = torch.cat(logits)
    return made | {f"weight/{k}": v for k, v in model.state_dict().items()}


def test_a_fresh_process_drafts_the_same_bit_for_bit(ready_road, config, tmp_path, repository):
    with_block_drafter(config)
    folders = {case: tmp_path / "-".join(map(str, case)) for case in CASES}
    expected = {case: exported(config, folder, *case) for case, folder in folders.items()}
    scripts = {"PYTHONPATH": str(repository / "scripts")}
    command = [sys.executable, "-c", PROGRAM, *map(str, folders.values())]
    subprocess.run(command, env=environment() | scripts, check=True)
    for case, folder in folders.items():
        found = load_file(folder / "found")
        assert found.keys() == expected[case].keys()
        for key, value in expected[case].items():
            assert found[key].dtype == value.dtype, (case, key)
            assert torch.equal(found[key], value), (case, key)
