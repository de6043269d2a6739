"""Faults of a training step: its batch, targets, loss, masks and what its drafts see; each is a function that edits
the code through pytest's monkeypatch."""

from collections.abc import Callable

import speculators.models.eagle3.core as eagle3_core
import torch
from speculators.models.dflash.attention import create_anchor_block_mask_mod
from speculators.models.eagle3.attention import create_combined_mask_mod

from draftmill import anchor_blocks, block_targets, dflash, eagle3, trainer
from draftmill.input_noise import noised

ALGORITHMS = {"small": eagle3, "block": dflash}
NOISED = {"small": eagle3, "block": block_targets}
STEP = {"small": "_passed", "block": "blocks"}  # where a batch becomes drafts and targets


def unchanged(patch) -> None:
    """The fault is in the settings."""


def batch_edit(drafter: str, edit: Callable[[torch.nn.Module, dict], dict]) -> Callable:
    """The step works on another batch than it was given."""

    def plant(patch) -> None:
        owner = ALGORITHMS[drafter].WithTargets
        real = getattr(owner, STEP[drafter])
        patch.setattr(owner, STEP[drafter], lambda self, batch: real(self, edit(self, batch)))

    return plant


def others_mask(patch) -> None:
    """The trainer gives the samples of a pack the loss mask of their neighbours."""
    real = trainer.Trainer._load

    def load(self, data, group: list[int], draw: str) -> dict:
        batch = real(self, data, group, draw)
        return batch | {"loss_mask": batch["loss_mask"].roll(9, 1)}

    patch.setattr(trainer.Trainer, "_load", load)


def one_draw(patch) -> None:
    """Every epoch draws what the first one drew."""
    real = trainer.Trainer._load

    def load(self, data, group: list[int], draw: str) -> dict:
        return real(self, data, group, f"{self.settings['seed']}/0")

    patch.setattr(trainer.Trainer, "_load", load)


def noised_last(model, batch: dict) -> dict:
    return batch | {"last": noised(batch["last"], model.noise) if model.training else batch["last"]}


def later_targets(model, batch: dict) -> dict:
    return batch | {"last": batch["last"].roll(-1, 1)}


def noise_in_place(drafter: str) -> Callable:
    def plant(patch) -> None:
        def wrong(states, scale):
            return states.add_(scale * torch.randn_like(states)) if scale else states

        patch.setattr(NOISED[drafter], "noised", wrong)

    return plant


def no_noise(drafter: str) -> Callable:
    return lambda patch: patch.setattr(NOISED[drafter], "noised", lambda states, scale: states)


def text_targets(drafter: str) -> Callable:
    """Hard cross-entropy on the text's own tokens: all probability on each next one."""

    def edit(model, batch: dict) -> dict:
        following, kept = batch["input_ids"][0].roll(-1), model.drafter.t2d.nonzero().flatten()

        class Text(torch.nn.Module):
            def forward(self, last):
                hard = (kept[None] == following[:, None]).float()[None] * 1e4
                return hard.to(last.dtype)

        object.__setattr__(model, "head", Text())
        return batch

    return batch_edit(drafter, edit)


def flat_gamma(patch) -> None:
    patch.setattr(block_targets, "gamma_of", lambda block: 1e9)


def learnt_dpace(patch) -> None:
    """D-PACE's weights carry a gradient."""

    def wrong(self, logits, targets, scored):
        q = torch.exp(-self.loss(logits[None], targets[None])[0]).view(scored.shape)
        smooth = (0.5 * q + 0.5).where(scored, torch.ones_like(q)).cumprod(-1) * scored
        found = smooth.flip(-1).cumsum(-1).flip(-1) * scored
        return (found / (scored.sum() + 1e-5)).flatten()

    patch.setattr(dflash.WithTargets, "weights", wrong)


def slot_0(model) -> None:
    """lm_head reads slots 0, 1, ... in place of 1, 2, ..."""
    found = []
    model.norm.register_forward_hook(lambda m, a, out: found.append(out))

    def wrong(module, args):
        blocks = found.pop().view(-1, model.block_size, args[0].shape[-1])
        return (blocks[:, :-1].reshape(args[0].shape),)

    model.lm_head.register_forward_pre_hook(wrong)


def everything_scored(patch) -> None:
    """Blocks are scored past the end of their document."""

    def wrong(anchors, block, loss_mask, documents):
        places = anchor_blocks.block_positions(anchors, block)
        good = places < len(loss_mask)
        good[:, 0] = False
        return good

    patch.setattr(anchor_blocks, "supervised", wrong)


def unaligned_mask(patch) -> None:
    real = anchor_blocks.supervised
    patch.setattr(anchor_blocks, "supervised", lambda a, b, mask, d: real(a, b, mask.roll(1), d))


def neighbours_scored(patch) -> None:
    real = anchor_blocks.supervised
    patch.setattr(
        anchor_blocks, "supervised", lambda a, b, mask, d: real(a, b, mask, d.clamp(max=0))
    )


def shifted(**wrong: Callable) -> Callable:
    """EAGLE-3's shift with other parts: name -> (sample, steps) -> tensor."""

    def plant(patch) -> None:
        real = eagle3.shifted

        def edited(sample, steps):
            return real(sample, steps) | {n: made(sample, steps) for n, made in wrong.items()}

        patch.setattr(eagle3, "shifted", edited)

    return plant


def unshifted_mask(sample, steps):
    mask = sample["loss_mask"][:-1].clone()
    mask[: steps - 1] = False
    return mask


# ---- what is seen ------------------------------------------------------------------------------


def block_mask(edit: Callable) -> Callable:
    def plant(patch) -> None:
        def wrong(documents, tokens, anchors, *rest):
            return create_anchor_block_mask_mod(*edit(documents, tokens, anchors), *rest)

        patch.setattr(anchor_blocks, "create_anchor_block_mask_mod", wrong)

    return plant


def chain_sees_neighbours(patch) -> None:
    patch.setattr(
        eagle3_core,
        "create_combined_mask_mod",
        lambda documents, *rest, **more: create_combined_mask_mod(
            torch.zeros_like(documents), *rest, **more
        ),
    )


def relative_positions(drafter: str) -> Callable:
    """Positions count from the row's start, not from the conversation's."""

    def edit(model, batch: dict) -> dict:
        size = batch["position_ids"].shape[1]
        return batch | {"position_ids": torch.arange(size)[None]}

    return batch_edit(drafter, edit)
