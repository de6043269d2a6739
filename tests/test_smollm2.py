"""The smoke configuration on the real target, and tau against a plain loop with it."""

import copy
import json
import shutil
from itertools import product

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import reference_loop
import zlab
from draftmill import acceptance, dflash, eagle3, tables
from draftmill.capture import Capture
from mini_road import MiniRoad
from workflow import PROJECT, Run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Run:
    """Smoke, with a training that makes some drafts right: 24 conversations, 60 steps on them."""
    config = yaml.safe_load((PROJECT / "configs/smoke.yaml").read_text())
    config["sources"]["stdlib_train"] |= {"limit": 24, "shard_size": 24}
    config["responses"]["max_new_tokens"] = 32
    config["responses"]["batch_size"] = 24
    training = {"steps": 60, "tokens_per_batch": 512, "learning_rate": 2e-3, "warmup_steps": 5}
    config["drafters"]["eagle3"]["training"] = training | {"validate_every": 60}
    run = Run(tmp_path_factory.mktemp("smoke") / "run", config)
    run.snakemake()
    return run


def test_the_smoke_configuration_reaches_a_report(smoke):
    assert smoke.result("report.html").is_file()
    found = json.loads(smoke.result("acceptance/eagle3/stdlib_test.json").read_text())
    assert found["tau_pooled"] >= 1
    gate = json.loads(smoke.result("gates/eagle3/stdlib_train/00000.json").read_text())
    assert gate["agreement"] >= 0.98


def test_on_twenty_prompts_in_fp32_every_step_is_that_of_the_plain_loop(smoke, tmp_path):
    checkpoint = smoke.result("target/checkpoint")
    target = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    folder = tmp_path / "drafter"
    shutil.copytree(smoke.result("drafters/eagle3"), folder)
    drafter = eagle3.load(folder, "cpu").float()
    layers = smoke.config["hidden_states"]["captures"]["eagle3"]["output_of"]
    rows = tables.read(smoke.result("responses/stdlib_train/00000.parquet"))[:20]
    lengths, stop = set(), {2}
    for row in rows:
        prompt = row["prompt_ids"]
        text, emitted = reference_loop.speculate(target, drafter, layers, prompt, 16, stop, 4)
        ids = prompt + text
        capture = Capture(target, layers)
        states = [state[0] for state in capture(torch.tensor([ids]), None)]
        capture.close()
        sample = {"input_ids": torch.tensor(ids), "aux": torch.cat(states[:-1], dim=-1)}
        proposals = eagle3.drafts(drafter, sample, 4)
        assert acceptance.walk(ids, len(prompt), proposals, 4).emitted == emitted
        lengths |= set(emitted)
    assert len(lengths) > 1, "a drafter that is never right tests nothing"


def test_a_second_start_has_nothing_to_do(smoke):
    assert smoke.stale() == {}


def test_on_ten_prompts_in_fp32_every_step_of_a_block_drafter_is_that_of_zlabs_loop(
    smoke, zlab_package, tmp_path, monkeypatch
):
    """The drafter is trained here, on the states that the run has stored."""
    monkeypatch.chdir(smoke.folder)
    config = copy.deepcopy(smoke.config)
    layers = config["hidden_states"]["captures"]["eagle3"]["output_of"]
    training = {"steps": 150, "learning_rate": 3e-3, "validate_every": 150, "anchors": 24}
    training = config["drafters"]["eagle3"]["training"] | training | {"loss": "ce"}
    config["drafters"]["block"] = {
        "algorithm": "dflash",
        "capture": "eagle3",
        "layers": {"output_of": layers},
        "num_layers": 1,
        "block_size": 4,
        "draft_vocab_size": 1024,
        "mask_token_id": 3,  # <repo_name>
        "training": training,
    }
    road = MiniRoad(config)
    road.build_draft_vocab("block")
    folder = tmp_path / "drafter"
    shutil.copytree(road.train("block"), folder)
    checkpoint = smoke.result("target/checkpoint")
    target = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    drafter = dflash.load(folder, "cpu").float()
    model = zlab.drafter_in(folder, target.config.num_hidden_layers)
    model.check_target(target)
    rows = tables.read(smoke.result("responses/stdlib_train/00000.parquet"))[:10]
    lengths = set()
    for row, block in product(rows, (4, 6)):
        prompt = row["prompt_ids"]
        text, emitted = zlab.generated(model, target, prompt, 24, [2], block)
        ids = prompt + text
        capture = Capture(target, layers)
        states = [state[0] for state in capture(torch.tensor([ids]), None)]
        capture.close()
        sample = {"input_ids": torch.tensor(ids), "aux": torch.cat(states[:-1], dim=-1)}
        end = len(prompt) + 24
        proposals = dflash.drafts(drafter, sample, block - 1, len(prompt), end)
        assert acceptance.walk(ids, len(prompt), proposals, block - 1).emitted == emitted
        lengths |= set(emitted)
    assert {1, 2, 3, 4} <= lengths, "drafts of every length must occur"
