"""SDPA without the hidden keys gives what SDPA over all keys gives, forwards and backwards."""

import pytest
import torch
from torch.nn import functional

from draftmill import anchor_blocks
from draftmill.visible_attention import visible_sdpa


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("documents", [1, 3])
def test_it_equals_sdpa_over_all_keys(documents, window):
    torch.manual_seed(0)
    tokens, block, heads, shared, width = 90, 5, 6, 2, 8
    numbers = torch.arange(tokens) * documents // tokens
    anchors = torch.randperm(tokens - 1)[:31].sort().values + 1
    mask = anchor_blocks.visibility(numbers, anchors, block, window, "cpu")
    queries = len(anchors) * block
    q, k, v = (
        torch.randn(1, n, size, width, requires_grad=True)
        for n, size in ((heads, queries), (shared, tokens + queries), (shared, tokens + queries))
    )
    found, weights = visible_sdpa(None, q, k, v, mask, scaling=0.3)
    assert weights is None
    expected = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    pull = torch.randn_like(found)
    for mine, theirs in zip(
        torch.autograd.grad((found * pull).sum(), (q, k, v)),
        torch.autograd.grad((expected * pull).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
