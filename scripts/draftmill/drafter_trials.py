"""Trials of an exported drafter on a few answers: what its acceptance becomes when something is taken away.

A drafter that is any good loses acceptance when its states are another prompt's, when its fc passes nothing
on, when its layers do nothing. One that does not, ignores them, and its tau says nothing of the states.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import torch
from torch import nn

from draftmill import acceptance
from draftmill.errors import DraftmillError
from draftmill.state_dataset import StateDataset
from draftmill.target_head import TargetHead

ANSWERS = 16
ANSWER_TOKENS = 96  # of each, so that long answers take no more time
CLEAR_GAIN = 0.3  # tau - 1 below which nothing can be told
FEWEST_STEPS = 50
KEPT_GAIN = 0.7  # the largest share of tau - 1 that may be left


@dataclass(frozen=True)
class Text:
    """An answer, its states, and those of another prompt.

    sample: input_ids int64 [tokens], aux [tokens, layers * hidden], last [tokens, hidden]. start: the answer's first token.
    foreign: [tokens, layers * hidden].
    """

    sample: dict[str, torch.Tensor]
    start: int
    foreign: torch.Tensor


def texts_of(data: StateDataset) -> list[Text]:
    """Up to ANSWERS answers, spread over the data, each beside the states of another conversation.

    Both are cut to the shorter of the two. Neighbours in length are paired, so that little is cut.
    """
    firsts: dict[tuple, int] = {}
    for index in range(len(data)):
        about = data.about(index)
        firsts.setdefault((data.places[index][0], about["row"]), index)
    chosen = list(firsts.values())
    chosen = chosen[:: -(-len(chosen) // ANSWERS)]
    chosen.sort(key=lambda index: data.about(index)["tokens"])
    texts = []
    for index, other in pairwise([*chosen, *chosen[-2:-1]]):
        sample, foreign, start = data[index], data[other]["aux"], data.about(index)["start"]
        tokens = min(len(sample["input_ids"]), len(foreign), start + ANSWER_TOKENS)
        if start and tokens - start > 1:
            kept = {k: sample[k][:tokens] for k in ("input_ids", "aux", "last")}
            texts.append(Text(kept, start, foreign[:tokens]))
    return texts


def drafts(algorithm: ModuleType, drafter: nn.Module, text: Text, steps: int) -> torch.Tensor:
    """int64 [tokens - 1, steps], the answer's rows at least."""
    return algorithm.drafts(drafter, text.sample, steps, text.start)


def tau(texts: list[Text], drafted: list[torch.Tensor], steps: int) -> tuple[float | None, int]:
    """Pooled tau and the number of steps."""
    walks = [
        acceptance.walk(text.sample["input_ids"].tolist(), text.start, rows, steps)
        for text, rows in zip(texts, drafted, strict=True)
    ]
    return acceptance.pooled_tau(walks), sum(len(w.emitted) for w in walks)


@torch.inference_mode()
def first_right(
    texts: list[Text], drafted: list[torch.Tensor], head: TargetHead, known: torch.Tensor | None
) -> tuple[int, int]:
    """How many first drafts are the target's choice among the tokens that can be drafted, as training counts
    them, and of how many; whether the text is the target's own greedy one or not.

    known: t2d, bool [vocab], or None where every token can be drafted.
    """
    right = total = 0
    for text, rows in zip(texts, drafted, strict=True):
        # row j: token j + 1 is the last one known, and its last state gives the distribution of the next
        logits = head(text.sample["last"][None, text.start : -1].to(head.lm_head.weight.device))[0]
        if known is not None:
            logits = logits.masked_fill(~known.bool().to(logits.device), -torch.inf)
        wanted = logits.argmax(-1).cpu()
        right += int((rows[text.start - 1 :][: len(wanted), 0] == wanted).sum())
        total += len(wanted)
    return right, total


def of_other_prompts(algorithm, drafter, texts: list[Text], steps: int) -> list[torch.Tensor]:
    swapped = [Text(t.sample | {"aux": t.foreign}, t.start, t.foreign) for t in texts]
    return [drafts(algorithm, drafter, text, steps) for text in swapped]


def without_states(algorithm, drafter, texts: list[Text], steps: int) -> list[torch.Tensor]:
    with zeroed([drafter.fc]):
        return [drafts(algorithm, drafter, text, steps) for text in texts]


def without_layers(algorithm, drafter, texts: list[Text], steps: int) -> list[torch.Tensor]:
    """Each layer's attention and MLP add nothing, so its output is what entered its residual branch."""
    parts = [p for layer in drafter.layers for p in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    with zeroed(parts):
        return [drafts(algorithm, drafter, text, steps) for text in texts]


@contextmanager
def zeroed(modules: list[nn.Module]) -> Iterator[None]:
    """Sets the parameters of some modules to zero for a while."""
    kept = [(p, p.detach().clone()) for module in modules for p in module.parameters()]
    with torch.no_grad():
        for parameter, _ in kept:
            parameter.zero_()
        try:
            yield
        finally:
            for parameter, values in kept:
                parameter.copy_(values)


TRIALS = {
    "shuffle": (
        of_other_prompts,
        "with the states of other prompts",
        "its drafts follow from the tokens alone, or the states it gets are not those it was trained on; look at "
        "the layers (output_of), their order and the gate of hidden_states",
    ),
    "states": (
        without_states,
        "with fc set to zero",
        "its drafts do not depend on the target's states; look at fc and at the states' scale",
    ),
    "layers": (
        without_layers,
        "with its layers replaced by the identity",
        "its layers do nothing; look at what was trained and at training.learning_rate",
    ),
}


def trials(
    algorithm: ModuleType,
    drafter: nn.Module,
    texts: list[Text],
    own: list[torch.Tensor],
    steps: int,
) -> tuple[dict, list[str]]:
    """tau of the drafter and of each trial, and warnings.

    own: its drafts of each text. Raises DraftmillError where a trial keeps more than KEPT_GAIN of a clear gain.
    """
    right, count = tau(texts, own, steps)
    found = {"answers": len(texts), "steps": count, "tau": right}
    for name, (trial, _, _) in TRIALS.items():
        found[f"tau_{name}"] = tau(texts, trial(algorithm, drafter, texts, steps), steps)[0]
    decided = len(texts) > 1 and count >= FEWEST_STEPS and right - 1 >= CLEAR_GAIN
    found["decided"] = decided
    if not decided:
        told = "none" if right is None else f"{right:.2f}"
        return found, [
            f"shuffle, states and layers are not decided: tau is {told} over {count} steps of {len(texts)} answers, "
            f"where at least {1 + CLEAR_GAIN:.2f} over {FEWEST_STEPS} steps of two answers can be told from chance; "
            "train longer, or look at the layers (output_of)."
        ]
    for name, (_, how, why) in TRIALS.items():
        kept = (found[f"tau_{name}"] - 1) / (right - 1)
        if kept > KEPT_GAIN:
            raise DraftmillError(
                f"check: {name}: {how}, tau is {found[f'tau_{name}']:.2f} instead of {right:.2f}: {kept:.0%} of what "
                f"the drafter gains, expected at most {KEPT_GAIN:.0%}; {why}."
            )
    return found, []
