"""Quantised weights have the values that their formats define, in both backends, and activations stay as they are."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.utils.quantization_config import FineGrainedFP8Config

import families
from draftmill import fp8_blocks, target_model
from draftmill.compressed_config import weights_only
from draftmill.dtype_policy import Ledger
from draftmill.errors import DraftmillError
from draftmill.target_skeleton import Skeleton
from family_layouts import block_fp8

NAMES = ["deepseek_v3_fp8", "llama_fp8", "llama_int4"]
Tensors = dict[str, torch.Tensor]


def by_formula(tensors: Tensors) -> Tensors:
    """bf16 weights under their names on disk, each value by itself: number times scale, rounded once."""
    found = {}
    for key, value in tensors.items():
        name = key.removesuffix("_packed")
        if key.endswith(".weight_packed"):
            shifts = 4 * torch.arange(8)
            numbers = ((value.long()[..., None] >> shifts) & 15).flatten(1) - 8
            scales = tensors[f"{name}_scale"].float().repeat_interleave(32, 1)
        elif f"{key}_scale_inv" in tensors:
            rows, columns = value.shape
            scales = tensors[f"{key}_scale_inv"].float()
            scales = scales[torch.arange(rows) // 128][:, torch.arange(columns) // 128]
            numbers = value
        elif f"{key}_scale" in tensors:
            numbers, scales = value, tensors[f"{key}_scale"].float()
        else:
            numbers, scales = value, torch.ones(())
        found[name] = (numbers.float() * scales).to(torch.bfloat16)
    return found


def expected_of(name: str, weights: Tensors) -> torch.Tensor:
    """A parameter of the model, the experts' stacked."""
    if ".experts." not in name:
        return weights[name]
    owner, part = name.rsplit(".", 1)
    parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else ["down_proj"]
    experts = range(
        len([k for k in weights if k.startswith(owner) and k.endswith(f"{parts[0]}.weight")])
    )
    return torch.stack(
        [torch.cat([weights[f"{owner}.{i}.{p}.weight"] for p in parts]) for i in experts]
    )


def loaded(folder: Path, backend: str) -> torch.nn.Module:
    manifest = {"checkpoint": str(folder), "trust_remote_code": False}
    if backend == "resident":
        return target_model.load(manifest, "bfloat16", Ledger())
    skeleton = Skeleton(manifest, torch.bfloat16, "cpu")
    for index in range(skeleton.model.config.num_hidden_layers):
        skeleton.load(skeleton.of_layer(index))
    return skeleton.model


@pytest.mark.parametrize("backend", ["resident", "streamed"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_number_times_scale(name, backend, family):
    weights = by_formula(families.tensors_of(family(name)))
    found = {
        k: p
        for k, p in loaded(family(name), backend).named_parameters()
        if ".layers." in k and p.dim() > 1 and not k.endswith("_scale")
    }
    assert len(found) >= 40
    for key, parameter in found.items():
        assert torch.equal(parameter, expected_of(key, weights)), key


@pytest.mark.parametrize("backend", ["resident", "streamed"])
def test_activations_are_not_rounded(backend, family):
    states = torch.randn(3, 128).to(torch.bfloat16)
    ours = loaded(family("llama_fp8"), backend).model.layers[0].mlp.down_proj
    assert torch.equal(ours(states), linear(states, ours.weight))
    # as served they are, and transformers would round them as well
    model = AutoModelForCausalLM.from_pretrained(family("llama_fp8"), dtype=torch.bfloat16)
    model(input_ids=torch.zeros(1, 1, dtype=torch.long))  # dequantises
    theirs = model.model.layers[0].mlp.down_proj
    assert torch.equal(theirs.weight, ours.weight)
    assert not torch.equal(theirs(states), ours(states))


def test_a_cut_block_has_its_own_scale_where_transformers_would_spread_it():
    """576 rows are those of DeepSeek-V3's kv_a_proj_with_mqa; 192 divide by their two blocks, wrongly."""
    step = Fp8Dequantize(type("Quantizer", (), {"quantization_config": FineGrainedFP8Config()}))
    for rows, columns in ((576, 256), (192, 64), (64, 184), (576, 7)):
        weight = torch.randn(rows, columns) * torch.linspace(1, 50, rows)[:, None]
        tensors = dict(
            zip(("weight", "weight_scale_inv"), block_fp8(weight, torch.float32), strict=True)
        )
        found = step._dequantize_one(*tensors.values(), torch.bfloat16)
        assert torch.equal(found, by_formula(tensors)["weight"])
        if rows == 192:
            theirs = fp8_blocks.by_even_blocks(step, *tensors.values(), torch.bfloat16)
            assert not torch.equal(theirs, found)
        if rows == 576:
            with pytest.raises(ValueError, match="not divisible by scale grid"):
                fp8_blocks.by_even_blocks(step, *tensors.values(), torch.bfloat16)


def quantisation_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def test_a_format_that_is_told_by_its_activations_stays_what_it_is(family):
    found = quantisation_of(family("llama_fp8"))
    group = found["config_groups"]["group_0"]
    for args in (group["weights"], group["input_activations"]):
        args |= {"type": "int"}
    ours = weights_only(found)["config_groups"]["group_0"]
    assert ours["format"] == "int-quantized"  # packed, were it for the weights alone
    assert ours["input_activations"] is None


def test_a_quantised_cache_is_left_as_computed(family):
    found = quantisation_of(family("llama_int4"))
    args = found["config_groups"]["group_0"]["weights"] | {"strategy": "tensor", "group_size": None}
    assert weights_only(found | {"kv_cache_scheme": args})["kv_cache_scheme"] is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"transform_config": {"config_groups": {"R4": {}}}}, "transform_config' rotates"),
        ({"quantization_status": "frozen"}, "quantization_status' is 'frozen', so its weights are"),
    ],
)
def test_what_transformers_would_ignore_is_refused_by_its_key(change, sentence, family):
    with pytest.raises(DraftmillError, match=re.escape(sentence)):
        weights_only(quantisation_of(family("llama_int4")) | change)
