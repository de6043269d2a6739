"""One scale per block of an FP8 weight, whether experts are stored one by one or as one tensor."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from draftmill.checkpoint_fit import check_scales
from draftmill.errors import DraftmillError

NAME = "model.layers.0.mlp.experts.down_proj"
QUANTISATION = {"weight_block_size": (128, 128)}  # as transformers has it; a list in config.json
MODEL = SimpleNamespace(config=LlamaConfig(quantization_config=QUANTISATION))


def checked(folder, shape: tuple[int, ...], scales: tuple[int, ...]) -> None:
    names = [NAME, f"{NAME}_scale_inv"]
    tensors = {
        names[0]: torch.zeros(shape, dtype=torch.float8_e4m3fn),
        names[1]: torch.ones(scales),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    check_scales(MODEL, names, folder)


@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        ((128, 256), (1, 2)),
        ((130, 7), (2, 1)),
        ((4, 130, 256), (4, 2, 2)),
        ((2, 3, 5, 129), (2, 3, 1, 2)),
    ],
)
def test_one_scale_per_block_fits_with_any_leading_dimensions(shape, scales, tmp_path):
    checked(tmp_path, shape, scales)


@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        ((128, 256), (2, 1)),
        ((4, 130, 256), (2, 2)),
        ((4, 130, 256), (1, 2, 2)),
        ((4, 130, 256), (4, 2, 1)),
        ((4, 130, 256), (4, 130, 256)),
        ((256,), (1,)),
    ],
)
def test_other_scales_are_refused_with_both_shapes(shape, scales, tmp_path):
    with pytest.raises(DraftmillError) as caught:
        checked(tmp_path, shape, scales)
    assert f"{NAME} has shape {shape} and scales of shape {scales}; expected are" in str(
        caught.value
    )
