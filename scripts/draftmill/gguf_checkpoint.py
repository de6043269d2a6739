"""A GGUF file unpacked into a checkpoint in Hugging Face layout."""

import os
import tempfile
from pathlib import Path

import torch
import transformers

from draftmill import gguf_tokenizer
from draftmill.atomic import fsync
from draftmill.dtype_policy import DTYPES


def build_from_gguf(gguf: Path, checkpoint: Path, proven: bool) -> None:
    """Unpacks a GGUF into a bf16 checkpoint in Hugging Face layout.

    proven: a golden table decides on its tokenizer, or another place gives the tokenizer. Raises DraftmillError
    where neither does and its pre-tokenizer is unknown.
    """
    tokenizer = gguf_tokenizer.load(gguf, proven)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        # without it, weights may stay packed and every matrix product casts them
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).to(DTYPES["bfloat16"])
    model.config.architectures = [type(model).__name__]
    model.config.dtype = DTYPES["bfloat16"]
    checkpoint.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=checkpoint.parent, suffix=".tmp") as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for path in sorted(Path(scratch).iterdir()):
            fsync(path)
            os.replace(path, checkpoint / path.name)
    fsync(checkpoint)
