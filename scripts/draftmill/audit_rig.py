"""The step that an audit runs and what it sees of it: by hooks, whatever the algorithm's code says of itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import nn

from draftmill import target_head
from draftmill.drafter_training import Training

SEED = 987654321  # of what is drawn in an audit, so that training's draws stay its own


@dataclass
class Seen:
    """What one step did.

    logits: of all drafts, [drafts, draft vocabulary], in the order of the drafter's lm_head calls. loss: its
    scalar. targets: what the target's head gave. embedded, rotated: ids and positions of each call. normed,
    projected: outputs of the drafter's final norm and inputs of its lm_head.
    """

    parts: list[torch.Tensor] = field(default_factory=list)
    loss: torch.Tensor | None = None
    targets: list[torch.Tensor] = field(default_factory=list)
    embedded: list[torch.Tensor] = field(default_factory=list)
    rotated: list[torch.Tensor] = field(default_factory=list)
    normed: list[torch.Tensor] = field(default_factory=list)
    projected: list[torch.Tensor] = field(default_factory=list)

    @property
    def logits(self) -> torch.Tensor:
        return torch.cat([part.detach().flatten(0, -2) for part in self.parts])


@dataclass(frozen=True)
class Rig:
    """A model with targets that can be run: the one that is trained, or its copy in fp32."""

    name: str
    model: nn.Module
    dtype: torch.dtype  # of the states that it takes
    device: torch.device

    @property
    def drafter(self) -> nn.Module:
        return self.model.drafter

    def run(self, batch: dict, training: bool = False, gradients: bool = False) -> Seen:
        """One forward pass, with random numbers of its own."""
        found = Seen()
        with torch.random.fork_rng(), watched(self.model, found), torch.set_grad_enabled(gradients):
            torch.manual_seed(SEED)
            self.model.train(training)
            found.loss, _ = self.model(self.placed(batch))
        return found

    def placed(self, batch: dict) -> dict[str, torch.Tensor]:
        kept = {k: v.to(self.device) for k, v in batch.items()}
        return kept | {k: kept[k].to(self.dtype) for k in ("aux", "last")}


@contextmanager
def watched(model: nn.Module, found: Seen) -> Iterator[None]:
    drafter = model.drafter

    def keep(place: list) -> Callable:
        return lambda module, args, out: place.append(out)

    def entered(place: list, index: int) -> Callable:
        return lambda module, args: place.append(args[index].detach())

    hooks = [
        drafter.lm_head.register_forward_hook(keep(found.parts)),
        drafter.lm_head.register_forward_pre_hook(entered(found.projected, 0)),
        drafter.norm.register_forward_hook(keep(found.normed)),
        drafter.embed_tokens.register_forward_pre_hook(entered(found.embedded, 0)),
        drafter.rotary_emb.register_forward_pre_hook(entered(found.rotated, 1)),
        model.head.register_forward_hook(keep(found.targets)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def real(training: Training) -> Rig:
    """The step as it is trained, autocast included."""
    dtype = training.data["train"][0]["last"].dtype
    device = training.trainer.accelerator.device
    return Rig("as it is trained", training.trainer.model, dtype, device)


def exact(training: Training, algorithm: ModuleType, weights: dict | None = None) -> Rig:
    """The same model and head made anew in fp32; with random weights where `weights` is None."""
    tensors = {k: v.float() for k, v in training.tensors.items()}
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        drafter = algorithm.new_drafter(
            training.config, tensors, training.t2d, training.d2t, torch.float32
        )
    if weights is not None:
        drafter.load_state_dict(weights)
    rows = training.t2d if drafter.use_draft_vocab else None
    device = training.trainer.accelerator.device
    head = target_head.TargetHead(training.manifest, tensors, rows).to(device)
    model = algorithm.WithTargets(drafter.to(device), head, training.stage.config)
    return Rig("in fp32", model, torch.float32, device)


@dataclass(frozen=True)
class Drafts:
    """What a step should draft, known from the raw samples: int64 or bool tensors [drafts].

    document: -1 where a draft is of none, or its chain leaves it; nothing else is said of those. anchor: the
    last token known before drafting, as an index in the document. slot: 1 for the first draft; the drafted
    token is anchor + slot. inside: whether a loss may hang on it without leaving the document. known: the last
    token that was fed. scored: whether it carries a loss.
    position, first_unseen: packed rows, as Predictions names them.
    """

    document: torch.Tensor
    anchor: torch.Tensor
    slot: torch.Tensor
    inside: torch.Tensor
    known: torch.Tensor
    scored: torch.Tensor
    position: torch.Tensor
    first_unseen: torch.Tensor
