"""The whole road, prompts to tau, on nested targets: Kimi-K2.5 (also INT4, streamed) and Qwen3.5 (dense and MoE),
for EAGLE-3 and DFlash from one capture."""

import copy
import json

import pytest
from accelerate.state import AcceleratorState

import families
from draftmill import dflash
from mini_road import MiniRoad, write_data
from workflow import Run, rows, tiny_config, with_block_drafter

SEEDS = ("kimi_k25", "kimi_k25_int4", "qwen3_5", "qwen3_5_moe")
DRAFTERS = ("mixed", "plain", "block")
ANGLES = {
    "kimi_k25_int4": {"rope_type": "yarn", "factor": 8.0},
    "qwen3_5": {"rope_type": "default", "rope_theta": 10000.0},
}


def config_for(checkpoint) -> dict:
    """An EAGLE-3 drafter with fp32 master weights, one in plain bf16, and a DFlash drafter."""
    config = tiny_config(checkpoint)
    mixed = config["drafters"]["small"]
    plain = copy.deepcopy(mixed)
    plain["training"]["precision"] = "bf16"
    config["drafters"] = {"mixed": mixed, "plain": plain}
    return with_block_drafter(config)


@pytest.mark.parametrize("name", SEEDS)
def test_prompts_become_a_measured_drafter(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data(rows(8), rows(2, 500), rows(3, 600))
    road = MiniRoad(config_for(families.make(name, tmp_path / name)))
    road.prepare_target()
    for source in road.plan.config["sources"]:
        road.to_states(source)
        gate = json.loads(road.gate_hidden_states(source).read_text())
        assert gate["agreement"] >= 0.99
    for drafter in DRAFTERS:
        road.build_draft_vocab(drafter)
        AcceleratorState._reset_state()  # one process trains in two precisions
        road.train(drafter)
        found = json.loads(road.measure_acceptance("judge", drafter).read_text())
        assert found["tau_pooled"] >= 1
        assert found["conditions"]["dtype"] == "bfloat16"
        assert set(found["record"]["dtypes"].values()) == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [("kimi_k25_int4", "streamed"), ("qwen3_5", "auto")])
def test_the_workflow_goes_from_configuration_to_report(name, backend, tmp_path):
    run = Run(tmp_path / "run", config_for(families.make(name, tmp_path / name)))
    run.write_data()
    rules = ("extract_hidden_states", "gate_hidden_states")
    options = [
        f"{rule}:{key}" for rule in rules for key in (f"backend={backend}", "shards_per_job=8")
    ]
    run.snakemake("--set-resources", *options)
    assert run.stale() == {}
    summary = run.result("summary.tsv").read_text().splitlines()
    assert {line.split("\t")[0] for line in summary} == {"drafter", *DRAFTERS}
    assert name in run.result("report.html").read_text()
    for drafter in DRAFTERS:
        record = json.loads(run.result(f"drafters/{drafter}/run.json").read_text())["record"]
        expected = "bfloat16" if drafter == "plain" else "float32"
        assert record["dtypes"]["drafter weights in training"] == expected
    states = list(run.result("hidden_states").iterdir())
    assert [path.name for path in states] == ["low"], "one capture for all drafters"
    about = json.loads(run.result("drafters/block/config.json").read_text())
    assert about["aux_hidden_state_layer_ids"] == [1, 3]
    angles = about["transformer_layer_config"]["rope_parameters"]
    assert ANGLES[name].items() <= angles.items()
    assert not {"mrope_section", "partial_rotary_factor"} & angles.keys()
    exported = dflash.load(run.result("drafters/block"), "cpu")
    assert exported.rotary_emb.config.rope_parameters == angles
