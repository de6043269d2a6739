"""What DSpark's step should do, written from its description and not from its code.

Blocks see what DFlash's see, but slot k, counted from 1, is that of the place before the token it drafts: the
first is the anchor's own. A Markov head adds W2 f to a slot's logits, where f is made of the embedding of the
text's token before the drafted one: itself; times a gate of state and embedding; or the output of a recurrence
over the slots of the block. A confidence head is trained by the cross-entropy of its guess against the overlap of
the draft's distribution with the target's.
"""

from functools import partial

import torch
from torch.nn.functional import linear, logsigmoid

from draftmill.audit_heads import Step
from draftmill.audited_dflash import (
    CHECKS,
    made_random,
    nudged,
    scaled,
    windows,
)
from draftmill.audited_dflash import drafts as blocks
from draftmill.audited_dflash import weights as of_blocks
from draftmill.audited_dflash import wrong_inputs as wrong_blocks

__all__ = ["CHECKS", "made_random", "nudged", "windows"]
drafts = partial(blocks, first=0)
weights = partial(of_blocks, first=0)
wrong_inputs = partial(wrong_blocks, first=0)
EPSILON = 1e-8  # of speculators' mean of the confidence


class Heads:
    """The Markov head's logits and the confidence head's loss, over the scored drafts of a step."""

    def __init__(self, step: Step):
        drafter, settings = step.rig.drafter, step.settings
        scored = step.drafts.scored.to(step.goals.device)
        own = {n: p.detach().double() for n, p in drafter.markov_head.named_parameters()}
        self.out = own["markov_w2.weight"]
        embedded, states = own["markov_w1.weight"][step.before], step.states
        made = features(settings["markov_head_type"], own, embedded, states, settings["block_size"])
        self.features = made[scored]
        self.guess, self.weight = None, None
        if settings["enable_confidence_head"]:
            seen = [states, embedded] if settings["confidence_head_with_markov"] else [states]
            head = drafter.confidence_head.proj
            seen = torch.cat(seen, dim=-1)[scored]
            bias = head.bias.detach().double()
            self.guess = linear(seen, head.weight.detach().double(), bias)[:, 0]
            weight = scaled(step.drafts, settings, EPSILON)[step.drafts.scored]
            alpha = settings["training"]["confidence_head_alpha"]
            self.weight = (alpha * weight).to(step.goals.device)

    def logits(self, own: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return own + linear(self.features[chosen], self.out)

    def loss(self, own: torch.Tensor, goals: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        if self.guess is None:
            return own.new_zeros(())
        q = self.logits(own.detach(), chosen).softmax(-1)
        overlap = torch.minimum(q, goals.double().softmax(-1)).sum(-1)
        guess = self.guess[chosen]
        losses = -overlap * logsigmoid(guess) - (1 - overlap) * logsigmoid(-guess)
        return (losses * self.weight[chosen]).sum()


def features(
    kind: str, own: dict, embedded: torch.Tensor, states: torch.Tensor, slots: int
) -> torch.Tensor:
    """What W2 is multiplied with, fp64 [drafts, rank]. embedded, states: [drafts, rank or hidden]."""
    if kind == "vanilla":
        return embedded
    if kind == "gated":
        both = torch.cat([states, embedded], dim=-1)
        return embedded * linear(both, own["gate_proj.weight"], own["gate_proj.bias"]).sigmoid()
    embedded, states = embedded.unflatten(0, (-1, slots)), states.unflatten(0, (-1, slots))
    memory, made = torch.zeros_like(embedded[:, 0]), []
    for slot in range(slots):
        fed = torch.cat([memory, embedded[:, slot], states[:, slot]], dim=-1)
        gate, new, out = linear(fed, own["joint_proj.weight"], own["joint_proj.bias"]).chunk(3, -1)
        memory = gate.sigmoid() * memory + gate.neg().sigmoid() * new.tanh()
        made.append(out.tanh())
    return torch.stack(made, dim=1).flatten(0, 1)
