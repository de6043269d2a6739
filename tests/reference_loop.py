"""A plain draft-and-verify loop with the real target and a drafting KV cache: the slow, obvious way."""

import torch
from transformers import DynamicCache


@torch.inference_mode()
def greedy(target, prompt: list[int], tokens: int, stop: set[int]) -> list[int]:
    """The target's own greedy answer, one full forward pass per token."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stop:
            break
    return ids[len(prompt) :]


@torch.inference_mode()
def features(target, ids: list[int], layers: list[int]) -> torch.Tensor:
    """Outputs of the decoder layers, side by side: [tokens, layers * hidden]."""
    states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in layers], dim=-1)


@torch.inference_mode()
def draft(drafter, ids: list[int], states: torch.Tensor, count: int) -> list[int]:
    """`count` draft tokens after `ids`, each fed back into the drafter.

    states: the target's features of all tokens but the last one known.
    """
    cache, proposals = DynamicCache(), []
    inputs = states if drafter.input_norm is None else drafter.input_norm(states)
    hidden = drafter.fc(inputs)[None]
    embedded = drafter.embed_tokens(torch.tensor([ids[1:]]))
    positions = torch.arange(1, len(ids))[None]
    for _ in range(count):
        x = torch.cat([embedded, hidden], dim=-1)
        size = x.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).tril()[None, None] if size > 1 else None
        for layer in drafter.layers:
            x = layer(
                x,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                position_embeddings=drafter.rotary_emb(x, positions),
            )
        choice = int(drafter.lm_head(drafter.norm(x))[0, -1].argmax())
        if drafter.d2t is not None:
            choice += int(drafter.d2t[choice])
        proposals.append(choice)
        embedded, hidden = drafter.embed_tokens(torch.tensor([[choice]])), x[:, -1:]
        positions = positions[:, -1:] + 1
    return proposals


@torch.inference_mode()
def speculate(
    target, drafter, layers: list[int], prompt: list[int], tokens: int, stop: set[int], count: int
) -> tuple[list[int], list[int]]:
    """Decodes with drafts; returns the answer and the tokens emitted in each verification step."""
    ids = [*prompt, int(target(torch.tensor([prompt])).logits[0, -1].argmax())]
    emitted = []
    while len(ids) - len(prompt) < tokens and ids[-1] not in stop:
        proposals = draft(drafter, ids, features(target, ids[:-1], layers), count)
        verified = target(torch.tensor([ids + proposals])).logits[0].argmax(-1).tolist()
        before = len(ids)
        for k in range(count + 1):
            ids.append(verified[before - 1 + k])
            done = ids[-1] in stop or len(ids) - len(prompt) == tokens
            if done or k == count or proposals[k] != ids[-1]:
                break
        emitted.append(len(ids) - before)
    return ids[len(prompt) :], emitted
