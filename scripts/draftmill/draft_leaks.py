"""Whether drafts depend on what is not known yet when they are made."""

from types import ModuleType

import torch
from torch import nn

from draftmill.drafter_trials import Text
from draftmill.errors import DraftmillError

TEXTS, ANCHORS = 4, 4  # looked at, and of each
DISTURBED = -8  # what a state is multiplied by


def check_leaks(algorithm: ModuleType, drafter: nn.Module, texts: list[Text], steps: int) -> dict:
    """Changes states and tokens from an anchor on; the drafts of that anchor and of those before must stay.

    An anchor is the last token known; its own state is not. In a chain, later drafts are fed with the text's
    tokens in place of the drafts before them, so only those that need none past the anchor are compared.
    Returns the anchors looked at, and in how many of them states before the anchor change a draft.
    """
    looked = sensitive = 0
    for text in texts[:TEXTS]:
        last = len(text.sample["input_ids"]) - 2
        for anchor in {
            text.start + (last - text.start) * i // ANCHORS for i in range(1, ANCHORS + 1)
        }:
            sample = {k: v[: anchor + steps + 2] for k, v in text.sample.items()}
            before, after, tokens = disturbed(sample, anchor, drafter.embed_tokens.weight.shape[0])

            def rows(sample: dict, anchor: int = anchor) -> torch.Tensor:
                return algorithm.drafts(drafter, sample, steps, max(1, anchor - 1))[:anchor]

            own = rows(sample)
            if not torch.equal(own, rows(after)):
                raise DraftmillError(
                    f"check: leak: a draft changes with the target's state at its anchor or after it (token {anchor}), "
                    "which no server has when it drafts; tau measured so cannot be reached; look at how states "
                    "and tokens are aligned in the drafting path."
                )
            known = torch.ones_like(own, dtype=torch.bool)
            if algorithm.DRAFTING == "chain":
                known = torch.arange(anchor)[:, None] + 1 + torch.arange(steps) <= anchor
            if not torch.equal(own[known], rows(tokens)[known]):
                raise DraftmillError(
                    f"check: leak: a draft changes with the tokens after its anchor (token {anchor}), the very ones "
                    "it is to propose; look at the attention mask and at the tokens in the drafting path."
                )
            looked += 1
            sensitive += not torch.equal(own[-1], rows(before)[-1])
    return {"anchors": looked, "anchors_that_follow_states": sensitive}


def disturbed(sample: dict, anchor: int, vocab: int) -> tuple[dict, dict, dict]:
    """The sample with other states before the anchor, from it on, and with other tokens after it."""
    before, after = sample["aux"].clone(), sample["aux"].clone()
    before[:anchor] *= DISTURBED
    after[anchor:] *= DISTURBED
    tokens = sample["input_ids"].clone()
    tokens[anchor + 1 :] = (tokens[anchor + 1 :] + 1 + vocab // 2) % vocab
    return sample | {"aux": before}, sample | {"aux": after}, sample | {"input_ids": tokens}
