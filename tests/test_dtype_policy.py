"""The dtype policy: what is not as declared is named and stops the stage."""

import pytest
import torch
from torch import nn

from draftmill.dtype_policy import BYTES, DTYPES, Ledger, name_of
from draftmill.errors import DraftmillError


def module(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    made = nn.Module()
    made.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])
    made.norm = nn.LayerNorm(2)
    made.register_buffer("scale", torch.ones(1))
    return made.to(dtype)


def test_what_is_as_declared_is_written_down():
    ledger = Ledger()
    ledger.expect("states", torch.bfloat16, "bfloat16")
    ledger.expect("loss", "float32", "float32")
    assert ledger == {"states": "bfloat16", "loss": "float32"}


@pytest.mark.parametrize("found", [torch.float32, torch.float16, torch.float64, "float32"])
def test_another_dtype_is_refused_with_component_found_and_declared(found):
    with pytest.raises(DraftmillError) as caught:
        Ledger().expect("states", found, "bfloat16")
    assert f"states is {name_of(found)}, but must be bfloat16" in str(caught.value)


@pytest.mark.parametrize("declared", ["bfloat16", "float32"])
def test_a_module_in_one_dtype_is_one_component(declared):
    ledger = Ledger()
    ledger.expect_module("drafter", module(DTYPES[declared]), declared)
    assert ledger == {"drafter": declared}


NAMES = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "norm.bias", "scale"]


@pytest.mark.parametrize("name", NAMES)
def test_a_single_float32_tensor_is_found_by_its_name(name):
    made = module()
    owner, _, leaf = name.rpartition(".")
    tensor = getattr(made.get_submodule(owner), leaf)
    tensor.data = tensor.data.float()
    with pytest.raises(DraftmillError) as caught:
        Ledger().expect_module("drafter", made, "bfloat16")
    assert f"drafter ({name}) is float32, but must be bfloat16" in str(caught.value)


def test_a_module_that_is_refused_is_not_written_down_as_declared():
    ledger = Ledger()
    with pytest.raises(DraftmillError):
        ledger.expect_module("drafter", module(torch.float32), "bfloat16")
    assert "drafter" not in ledger


@pytest.mark.parametrize("name", ["inv_freq", "original_inv_freq"])
def test_rotary_frequencies_may_stay_in_float32(name):
    made = module()
    made.layers[0].register_buffer(name, torch.ones(2), persistent=False)
    ledger = Ledger()
    ledger.expect_module("drafter", made, "bfloat16")
    assert ledger == {"drafter": "bfloat16"}


def test_a_parameter_that_merely_ends_alike_is_no_rotary_frequency():
    made = module()
    made.layers[0].register_parameter("my_inv_freq_gate", nn.Parameter(torch.ones(2)))
    with pytest.raises(DraftmillError, match="my_inv_freq_gate"):
        Ledger().expect_module("drafter", made, "bfloat16")


def test_integers_and_booleans_have_no_declared_dtype():
    made = module()
    made.register_buffer("d2t", torch.zeros(3, dtype=torch.int64))
    made.register_buffer("t2d", torch.zeros(3, dtype=torch.bool))
    ledger = Ledger()
    ledger.expect_module("drafter", made, "bfloat16")
    assert ledger == {"drafter": "bfloat16"}


def test_a_real_rotary_model_passes_in_bfloat16(tiny_target):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.bfloat16)
    kept = [n for n, b in model.named_buffers() if b.dtype == torch.float32]
    assert kept
    assert all(name.endswith("inv_freq") for name in kept)
    Ledger().expect_module("target weights", model, "bfloat16")
    model.model.norm.weight.data = model.model.norm.weight.data.float()
    with pytest.raises(DraftmillError, match=r"target weights \(model\.norm\.weight\) is float32"):
        Ledger().expect_module("target weights", model, "bfloat16")


def test_the_table_of_dtypes_is_torchs_own():
    for name, dtype in DTYPES.items():
        assert name_of(dtype) == name
        assert dtype.itemsize == BYTES[name]
