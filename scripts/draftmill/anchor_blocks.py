"""Which anchors a conversation trains, and what the slots of their blocks see.

A block of B tokens is the anchor, the last token known, and B - 1 mask tokens. It sees the context before
the anchor, of its own document only, and itself (speculators, models/dflash/attention.py).
"""

import random

import torch
from speculators.models.dflash.attention import create_anchor_block_mask_mod
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


def drawn(loss_mask: torch.Tensor, count: int, draw: str) -> torch.Tensor:
    """The anchors of one conversation: bool [tokens], at most `count`, a function of `draw` alone.

    An anchor is an answer's token whose successor is the answer's too, so that every block trains a slot
    and a packed neighbour changes nothing.
    """
    allowed = (loss_mask[:-1] & loss_mask[1:]).nonzero().flatten().tolist()
    chosen = random.Random(draw).sample(allowed, min(count, len(allowed)))
    anchors = torch.zeros_like(loss_mask)
    anchors[chosen] = True
    return anchors


def block_positions(anchors: torch.Tensor, block: int) -> torch.Tensor:
    """int64 [anchors, block]: the anchors' places and those that follow."""
    return anchors[:, None] + torch.arange(block, device=anchors.device)


def supervised(
    anchors: torch.Tensor, block: int, loss_mask: torch.Tensor, documents: torch.Tensor
) -> torch.Tensor:
    """bool [anchors, block]: slots that carry a loss.

    Never slot 0, the anchor itself; nothing past the first token that is no answer's or another document's.
    loss_mask, documents: [tokens] of the packed row.
    """
    places = block_positions(anchors, block)
    inside = places < len(loss_mask)
    places = places.clamp(max=len(loss_mask) - 1)
    good = inside & loss_mask[places] & (documents[places] == documents[anchors][:, None])
    good[:, 0] = True  # an imported or evaluated anchor may be the prompt's last token
    good = good.cumprod(-1).bool()
    good[:, 0] = False
    return good


def visibility(
    documents: torch.Tensor,
    anchors: torch.Tensor,
    block: int,
    window: int | None,
    device: str,
    whole_blocks: bool = False,
) -> torch.Tensor | BlockMask:
    """What each slot may attend to, keys being [context | all blocks]: speculators' mask function, as a bool
    tensor [1, 1, anchors * block, tokens + anchors * block] for SDPA on a CPU, or as flex attention's
    BlockMask on CUDA.

    whole_blocks: a slot sees its whole block where there is a window too, not only what stands before it.
    """
    tokens = len(documents)
    sees, queries, keys = create_anchor_block_mask_mod(
        documents, tokens, anchors, block, window, whole_blocks
    )
    if device == "cuda":
        return create_block_mask(sees, None, None, queries, keys, device=device)
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)[None]
    return sees(rows, rows, rows, columns)[
        None, None
    ]  # the first two, batch and head, are not looked at
