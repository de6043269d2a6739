"""What the checks of an audit share: the training, its packs, its step and what its algorithm should do."""

from dataclasses import dataclass
from types import ModuleType

import torch

from draftmill import audit_packs, audit_rig
from draftmill.audit_packs import Pack
from draftmill.audit_rig import Drafts, Rig
from draftmill.drafter_training import Training
from draftmill.target_head import TargetHead

CHUNK = 256  # drafts whose target logits are made at a time


@dataclass(frozen=True)
class Audited:
    """A training that is ready to run.

    companion: the audited_ module of its algorithm. file: the tensors of head.safetensors, read for the audit.
    first: packs of the first epoch. small: a few short documents. edges: the same, as if
    answers stood everywhere, so that drafts are scored up to their borders. long: the longest one.
    """

    training: Training
    algorithm: ModuleType
    companion: ModuleType
    file: dict[str, torch.Tensor]
    first: list[Pack]
    small: Pack
    edges: Pack
    long: Pack
    real: Rig
    exact: Rig

    @property
    def settings(self) -> dict:
        return self.training.stage.config

    def drafts(self, pack: Pack, batch: dict[str, torch.Tensor]) -> Drafts:
        return self.companion.drafts(pack, batch, self.settings)

    def head(self, dtype: torch.dtype) -> TargetHead:
        """The target's whole head, from the file."""
        tensors = {k: v.to(dtype) for k, v in self.file.items()}
        return TargetHead(self.training.manifest, tensors).to(self.real.device)

    @property
    def kept(self) -> torch.Tensor:
        """The target's ids of the draft vocabulary, int64."""
        d2t = self.training.d2t
        return d2t + torch.arange(len(d2t))

    @torch.no_grad()
    def goals(self, pack: Pack, drafts: Drafts, rig: Rig) -> torch.Tensor:
        """The target's logits for the scored drafts, fp32 [scored, draft vocabulary]: those after the token
        before the drafted one, from the raw samples."""
        head, kept = self.head(rig.dtype), self.kept.to(self.real.device)
        places = zip(
            drafts.document[drafts.scored].tolist(),
            (drafts.anchor + drafts.slot - 1)[drafts.scored].tolist(),
            strict=True,
        )
        last = torch.stack([pack.samples[number]["last"][place] for number, place in places])
        parts = last.to(rig.device, rig.dtype).split(CHUNK)
        return torch.cat([head(part[None])[0][:, kept].float() for part in parts])


def of(training: Training, algorithm: ModuleType, companion: ModuleType, file: dict) -> Audited:
    """The audit's view of a training."""
    trainer, data = training.trainer, training.data["train"]
    small = audit_packs.small(trainer, data)
    weights = {k: v.detach().clone() for k, v in training.drafter.state_dict().items()}
    return Audited(
        training,
        algorithm,
        companion,
        file,
        [audit_packs.first_of(trainer, data, number) for number in range(2)],
        small,
        audit_packs.with_edges(small),
        audit_packs.longest(trainer, data),
        audit_rig.real(training),
        audit_rig.exact(training, algorithm, weights),
    )
