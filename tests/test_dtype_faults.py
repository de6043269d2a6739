"""fp32 against the declared bf16, forced into three places: the run stops and names the component."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftmill import eagle3, shard_writer, trainer

pytestmark = pytest.mark.slow


@pytest.fixture
def run(finished_run, tmp_path):
    return finished_run.copy(tmp_path / "run")


def test_fp32_drafter_weights_in_evaluation_stop_it(run):
    path = run.result("drafters/small/model.safetensors")
    tensors = load_file(path)
    save_file({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}, path)
    run.result("acceptance/small/judge.json").unlink()
    found = run.snakemake("results/tiny/acceptance/small/judge.json", check=False)
    assert found.returncode != 0
    assert "drafter weights in evaluation" in found.stdout
    assert "is float32, but must be bfloat16" in found.stdout
    assert not run.result("acceptance/small/judge.json").exists()
