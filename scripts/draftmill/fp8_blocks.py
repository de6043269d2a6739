"""FP8 weights in blocks whose last row or column of blocks is cut.

DeepSeek-V3's kv_a_proj_with_mqa has 576 rows in blocks of 128, so five rows of scales. transformers divides the rows
by the number of scales instead: it fails where that leaves a rest, and elsewhere spreads the scales over blocks of
another size, silently.
"""

import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

by_even_blocks = Fp8Dequantize._dequantize_one


def dequantize_one(
    self: Fp8Dequantize,
    quantized: torch.Tensor,
    scales: torch.Tensor,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A weight [..., out, in] times the scales of its blocks, [..., ceil(out / rows), ceil(in / columns)], with
    the configuration's size of a block."""
    block = self.hf_quantizer.quantization_config.weight_block_size
    shape = quantized.shape[-2:]
    if block is None or scales.shape[-2:] != tuple(
        -(-size // step) for size, step in zip(shape, block, strict=True)
    ):
        return by_even_blocks(self, quantized, scales, output_dtype)
    whole = [count * step for count, step in zip(scales.shape[-2:], block, strict=True)]
    padded = quantized.new_zeros(*quantized.shape[:-2], *whole)
    padded[..., : shape[0], : shape[1]] = quantized
    return by_even_blocks(self, padded, scales, output_dtype)[..., : shape[0], : shape[1]]


def install() -> None:
    """Has transformers dequantise so, wherever it loads a checkpoint in this process."""
    Fp8Dequantize._dequantize_one = dequantize_one
