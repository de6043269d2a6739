"""What an algorithm's further heads make of the drafter's logits and add to its loss, in an audit's reference."""

from dataclasses import dataclass

import torch

from draftmill.audit_packs import Pack
from draftmill.audit_rig import Drafts, Rig, Seen


@dataclass(frozen=True)
class Step:
    """A step as the reference of its loss sees it.

    goals: the target's logits for the scored drafts, fp32 [scored, draft vocabulary].
    """

    rig: Rig
    seen: Seen
    drafts: Drafts
    pack: Pack
    goals: torch.Tensor
    settings: dict

    @property
    def states(self) -> torch.Tensor:
        """What lm_head was given for each draft, fp64 [drafts, hidden]."""
        return torch.cat([part.detach().flatten(0, -2) for part in self.seen.projected]).double()

    @property
    def before(self) -> torch.Tensor:
        """The text's token before each draft, int64 [drafts]; 0 where the draft is of no document."""
        ids = torch.zeros(len(self.drafts.slot), dtype=torch.long)
        places = self.drafts.anchor + self.drafts.slot - 1
        for number, sample in enumerate(self.pack.samples):
            own = (self.drafts.document == number) & (places < len(sample["input_ids"]))
            ids[own] = sample["input_ids"][places[own]]
        return ids.to(self.goals.device)


class NoHeads:
    """An algorithm whose drafts are lm_head's."""

    def __init__(self, step: Step):
        pass

    def logits(self, own: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The drafts' logits from lm_head's. chosen: which of the scored drafts these are, int64."""
        return own

    def loss(self, own: torch.Tensor, goals: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What these drafts add to the loss, a scalar that knows its gradient."""
        return own.new_zeros(())
