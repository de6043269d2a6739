"""fp32 against the declared bf16, forced into the drafter's weights, the stored states and the evaluation
path: the run stops, and the message names the component, what it is and what it must be."""

import pytest
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow

FAULTS = [
    # file, code, code with the fault, output that is asked for, component that is named
    (
        "scripts/draftmill/drafter_training.py",
        "DTYPES[weights])",
        "DTYPES['float32' if weights == 'bfloat16' else 'bfloat16'])",
        "drafters/small/run.json",
        "drafter weights in training",
    ),
    (
        "scripts/draftmill/trainer.py",
        'mixed_precision="bf16" if autocast else "no"',
        'mixed_precision="no"',
        "drafters/small/run.json",
        "drafter compute",
    ),
    (
        "scripts/draftmill/drafter_files.py",
        "    cast(drafter, DTYPES[dtype])\n",
        "",
        "drafters/small/run.json",
        "exported checkpoint",
    ),
    (
        "scripts/extract_hidden_states.py",
        "found = next(states)",
        "found = [s.float() for s in next(states)]",
        "hidden_states/low/judge/00000.parquet",
        "hidden states as captured",
    ),
    (
        "scripts/draftmill/target_model.py",
        "            dtype=config.dtype,",
        "            dtype=torch.float32,",
        "hidden_states/low/judge/00000.parquet",
        "target weights",
    ),
    (
        "scripts/draftmill/shard_reader.py",
        ".view(DTYPES[self.dtype])",
        ".view(DTYPES[self.dtype]).float()",
        "drafters/small/run.json",
        "hidden states",
    ),
    (
        "scripts/draftmill/eagle3.py",
        "(0, 0, 0, padding))[None].to(device),",
        "(0, 0, 0, padding))[None].to(device).float(),",
        "acceptance/small/judge.json",
        "states entering the drafter in evaluation",
    ),
    (
        "scripts/draftmill/drafter_evaluation.py",
        "drafter = algorithm.load(folder, device)",
        "drafter = algorithm.load(folder, device).float()",
        "acceptance/small/judge.json",
        "drafter weights in evaluation",
    ),
    (
        "scripts/draftmill/eagle3.py",
        "    proposals = model(\n",
        "    model = model.float()\n    proposals = model(\n",
        "acceptance/small/judge.json",
        "in evaluation",
    ),
]


@pytest.fixture
def run(finished_run, tmp_path):
    return finished_run.copy(tmp_path / "run")


@pytest.mark.parametrize("fault", FAULTS, ids=[f[4].replace(" ", "-") for f in FAULTS])
def test_a_component_in_another_dtype_stops_the_run_and_is_named(run, fault):
    file, code, planted, output, component = fault
    run.edit(file, code, planted)
    found = run.snakemake(f"results/tiny/{output}", check=False)
    assert found.returncode != 0
    assert "dtype: " in found.stdout, found.stdout[-3000:]
    sentence = found.stdout.split("dtype: ")[1].split(";")[0]
    assert component in sentence
    assert "is float32, but must be bfloat16" in sentence or (
        "is bfloat16, but must be float32" in sentence and "training" in component
    )


def test_a_checkpoint_cast_to_fp32_by_hand_is_refused_as_fp32(run):
    path = run.result("drafters/small/model.safetensors")
    tensors = load_file(path)
    save_file({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}, path)
    output = run.result("acceptance/small/judge.json")
    output.unlink()
    found = run.snakemake(str(output.relative_to(run.folder)), check=False)
    assert found.returncode != 0
    assert "drafter weights in evaluation" in found.stdout
    assert "is float32, but must be bfloat16" in found.stdout
    assert not output.exists()
