"""Acceptance of greedy drafts against greedy text, step by step.

tau is the mean number of tokens emitted per verification step of the target, the bonus token included, so
tau >= 1; the prefill's own token is no step, and a step is cut where the text ends. Two aggregations
circulate and differ: pooled (all emitted tokens / all steps) and the mean of per-response means.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Walk:
    """One response's steps.

    emitted: tokens of each step, bonus included, cut at the end of the text.
    accepted: accepted draft tokens of each step.
    """

    emitted: list[int]
    accepted: list[int]


def walk(ids: list[int], start: int, drafts: torch.Tensor, draft_tokens: int) -> Walk:
    """Follows drafting and verification along a response that the target produced greedily.

    ids: the whole sequence; start: index of the response's first token, which the prefill emits.
    drafts: int64 [tokens - 1, >= draft_tokens], row j the proposals for tokens j + 2, j + 3, ... once
    token j + 1 is known.
    """
    rows = drafts[:, :draft_tokens].tolist()
    emitted, accepted = [], []
    position = start  # the last token known
    while position < len(ids) - 1:
        proposals, text = rows[position - 1], ids[position + 1 : position + 1 + draft_tokens]
        right = 0
        while right < len(text) and proposals[right] == text[right]:
            right += 1
        accepted.append(right)
        emitted.append(min(right + 1, len(ids) - 1 - position))
        position += emitted[-1]
    return Walk(emitted, accepted)


def pooled_tau(walks: list[Walk]) -> float | None:
    steps = sum(len(w.emitted) for w in walks)
    return sum(sum(w.emitted) for w in walks) / steps if steps else None


def mean_tau(walks: list[Walk]) -> float | None:
    means = [sum(w.emitted) / len(w.emitted) for w in walks if w.emitted]
    return sum(means) / len(means) if means else None


def per_position(walks: list[Walk], draft_tokens: int) -> list[float]:
    """Share of all steps in which draft position k, and so every one before it, was accepted."""
    accepted = [a for w in walks for a in w.accepted]
    return [sum(a > k for a in accepted) / max(1, len(accepted)) for k in range(draft_tokens)]


def interval(walks: list[Walk], resamples: int, seed: int) -> list[float] | None:
    """The 95 % bootstrap interval of the pooled tau, responses resampled with replacement."""
    walks = [w for w in walks if w.emitted]
    if not walks:
        return None
    pairs = torch.tensor([[sum(w.emitted), len(w.emitted)] for w in walks], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(pairs), (resamples, len(pairs)), generator=generator)
    sums = torch.stack([pairs[pick].sum(0) for pick in picks])
    low, high = torch.quantile(sums[:, 0] / sums[:, 1], torch.tensor([0.025, 0.975]).double())
    return [float(low), float(high)]


def summary(walks: list[Walk], settings: dict) -> dict:
    """All figures of a set of responses."""
    return {
        "tau_pooled": pooled_tau(walks),
        "tau_pooled_interval": interval(walks, settings["bootstrap"], settings["seed"]),
        "tau_mean_of_means": mean_tau(walks),
        "acceptance_per_position": per_position(walks, settings["draft_tokens"]),
        "responses": len(walks),
        "steps": sum(len(w.emitted) for w in walks),
        "emitted_tokens": sum(sum(w.emitted) for w in walks),
    }


def by_category(walks: list[Walk], categories: list[str], settings: dict) -> dict[str, dict]:
    groups: dict[str, list[Walk]] = defaultdict(list)
    for found, category in zip(walks, categories, strict=True):
        groups[category].append(found)
    return {name: summary(group, settings) for name, group in sorted(groups.items())}
