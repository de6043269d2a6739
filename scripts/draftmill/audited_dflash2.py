"""What DFlash2's step should do, written from its description and not from its code (z-lab's dflash/model.py).

Blocks, slots and weights are DFlash's. Beside the drafts' loss, a selector is trained: for each slot it adds to the
logits of the K likeliest tokens the sum over r of pred[before, r] * (W h)[r] * succ[candidate, r], h being the slot's
state and `before` the text's token before the drafted one; its loss is the cross-entropy of the target's choice
among the K, in whose last place the choice stands where it is none of them.
"""

import torch

from draftmill.audit_heads import Step
from draftmill.audited_dflash import (
    CHECKS,
    drafts,
    made_random,
    nudged,
    scaled,
    smoothed,
    weights,
    windows,
    wrong_inputs,
)

__all__ = ["CHECKS", "drafts", "made_random", "nudged", "weights", "windows", "wrong_inputs"]
CHUNK = 256


class Heads:
    """The selector's loss, over the scored drafts of a step."""

    def __init__(self, step: Step):
        selector = step.rig.drafter.candidate_selector
        scored = step.drafts.scored.to(step.goals.device)
        self.count, self.goal = selector.top_k, step.goals.argmax(-1)
        before, states = step.before[scored], step.states[scored]
        projected = states @ selector.hidden_projection.weight.detach().double().T
        self.context = selector.predecessor_codebook.detach().double()[before] * projected
        self.codebook = selector.successor_codebook.detach().double()
        training = step.settings["training"]
        weight = scaled(step.drafts, step.settings)
        if training["position_weights"] == "dpace":
            own = step.seen.logits[scored]
            order = torch.arange(len(own), device=own.device)
            losses = [self.each(own[part].double(), part) for part in order.split(CHUNK)]
            confidence = torch.ones(len(scored), dtype=torch.float64)
            confidence[scored.cpu()] = torch.exp(-torch.cat(losses)).cpu()
            weight = smoothed(step.drafts, confidence, step.settings)
        self.weight = training["selector_loss_alpha"] * weight[step.drafts.scored]
        self.weight = self.weight.to(step.goals.device)

    def each(self, own: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        goal = self.goal[chosen]
        candidates = own.detach().topk(self.count, dim=-1).indices
        missing = (candidates != goal[:, None]).all(-1)
        candidates[missing, -1] = goal[missing]
        further = (self.context[chosen][:, None] * self.codebook[candidates]).sum(-1)
        scores = own.gather(-1, candidates) + further
        right = (scores * (candidates == goal[:, None])).sum(-1)
        return scores.logsumexp(-1) - right

    def logits(self, own: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return own

    def loss(self, own: torch.Tensor, goals: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return (self.each(own, chosen) * self.weight[chosen]).sum()
