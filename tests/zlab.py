"""z-lab's own generation loop (PyPI `dflash`) on a drafter that was exported here."""

import time
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from draftmill.atomic import read_json


def drafter_in(folder: Path, layers: int):
    """z-lab's DFlashDraftModel in float32 with the weights of an exported drafter.

    layers: of the target, which its configuration names. Its embedding and head are the target's; those of
    the export must be their rows. A reduced vocabulary is the full one with minus infinity elsewhere.
    """
    from dflash.model import DFlashDraftModel

    exported = read_json(folder / "config.json")
    tensors = load_file(folder / "model.safetensors")
    config = Qwen3Config.from_dict(exported["transformer_layer_config"])
    config.num_target_layers = layers
    config.dflash_config = {
        "target_layer_ids": [i - 1 for i in exported["aux_hidden_state_layer_ids"]],
        "mask_token_id": exported["mask_token_id"],
        "block_size": exported["block_size"],
    }
    embedding, head = tensors.pop("embed_tokens.weight"), tensors.pop("lm_head.weight")
    kept = tensors.pop("t2d", None)
    tensors.pop("d2t", None)

    class Drafter(DFlashDraftModel):
        def compute_logits(self, hidden, output_head):
            logits = super().compute_logits(hidden, output_head)
            return logits if kept is None else logits.masked_fill(~kept.bool(), float("-inf"))

        def check_target(self, target) -> None:
            own = target.get_input_embeddings().weight, target.get_output_embeddings().weight
            assert torch.equal(own[0], embedding.float())
            assert torch.equal(own[1] if kept is None else own[1][kept.bool()], head.float())

    model = Drafter(config)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == ([], [])
    return model.float().eval()


def generated(model, target, prompt: list[int], limit: int, stop: list[int], block: int):
    """The answer and the tokens emitted in each verification step."""
    from dflash.model import dflash_generate

    with mock.patch("dflash.model._cuda_time", time.perf_counter):  # the steps come with times
        found = dflash_generate(
            model, target, torch.tensor([prompt]), limit, stop, block_size=block, return_stats=True
        )
    return found.output_ids[0, len(prompt) :].tolist(), found.acceptance_lengths
