"""How much of a shard's answers is the text that the target would emit greedily."""

import torch
from torch import nn

from draftmill import shard_layout
from draftmill.shard_reader import Shard

NEAR_TIE_ULPS = 2  # units in the last place of the highest logit
# logits made at a time: 80 MB in bf16 at Kimi's 163,840 tokens, where a whole answer's would take gigabytes;
# the product with lm_head is no faster with more rows
ROWS = 256


@torch.inference_mode()
def greedy_share(shard: Shard, head: nn.Module) -> float | None:
    """The share of answer tokens, the first excepted, that are the argmax before them, or so near to it that
    the dtype's rounding decides between a cached and a full pass; None where there are none.

    head: states [1, rows, hidden] -> logits [1, rows, vocab] (target_head.py).
    """
    equal = total = 0
    for index, sample in enumerate(shard.samples):
        found = shard.read(index, ["input_ids", shard_layout.LAST])
        states = found[shard_layout.LAST][sample["start"] : -1]
        expected = found["input_ids"][sample["start"] + 1 :]
        for some, wanted in zip(states.split(ROWS), expected.split(ROWS), strict=True):
            equal += greedy_count(head, some, wanted)
        total += len(expected)
    return equal / total if total else None


def greedy_count(head: nn.Module, states: torch.Tensor, expected: torch.Tensor) -> int:
    """How many ids of `expected`, int64 [rows], are the greedy choice after `states` [rows, hidden]."""
    if not len(expected):  # an answer of one token; an empty tensor splits into one empty part
        return 0
    logits = head(states[None].to(head.lm_head.weight.device))[0]
    highest = logits.amax(-1).float()
    chosen = logits.gather(-1, expected.to(logits.device)[:, None])[:, 0].float()
    near = NEAR_TIE_ULPS * torch.finfo(logits.dtype).eps * highest.abs()
    return int((highest - chosen <= near).sum())
