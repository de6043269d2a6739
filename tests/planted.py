"""Faults to plant in the code that trains a drafter, with the check that must name each."""

from collections.abc import Callable
from dataclasses import dataclass, field

import speculators.models.eagle3.core as eagle3_core
import torch
from speculators.models.dflash.attention import create_anchor_block_mask_mod
from speculators.models.eagle3.attention import create_combined_mask_mod

from draftmill import anchor_blocks, dflash, drafter_training, eagle3, state_dataset, target_head
from draftmill.input_noise import noised

ALGORITHMS = {"small": eagle3, "block": dflash}
STEP = {"small": "_passed", "block": "predict"}  # where a batch becomes drafts and targets


@dataclass(frozen=True)
class Planted:
    """plant: edits the code through pytest's monkeypatch. changes: settings of the drafter that it needs."""

    name: str
    drafter: str
    check: str
    plant: Callable
    says: str = ""
    changes: dict = field(default_factory=dict)


def unchanged(patch) -> None:
    """The fault is in the settings."""


# ---- batches, targets, losses ------------------------------------------------------------------


def batch_edit(drafter: str, edit: Callable[[torch.nn.Module, dict], dict]) -> Callable:
    """The step works on another batch than it was given."""

    def plant(patch) -> None:
        owner = ALGORITHMS[drafter].WithTargets
        real = getattr(owner, STEP[drafter])
        patch.setattr(owner, STEP[drafter], lambda self, batch: real(self, edit(self, batch)))

    return plant


def noised_last(model, batch: dict) -> dict:
    return batch | {"last": noised(batch["last"], model.noise) if model.training else batch["last"]}


def later_targets(model, batch: dict) -> dict:
    return batch | {"last": batch["last"].roll(-1, 1)}


def noise_in_place(drafter: str) -> Callable:
    def plant(patch) -> None:
        def wrong(states, scale):
            return states.add_(scale * torch.randn_like(states)) if scale else states

        patch.setattr(ALGORITHMS[drafter], "noised", wrong)

    return plant


def no_noise(drafter: str) -> Callable:
    return lambda patch: patch.setattr(ALGORITHMS[drafter], "noised", lambda states, scale: states)


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
    patch.setattr(dflash, "gamma_of", lambda block: 1e9)


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
        blocks, slots, hidden = args[0].shape
        return (found.pop().view(blocks, slots + 1, hidden)[:, :-1],)

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


# ---- the drafter -------------------------------------------------------------------------------


def new_drafter(drafter: str, edit: Callable) -> Callable:
    """The drafter is changed after it was made."""

    def plant(patch) -> None:
        real = ALGORITHMS[drafter].new_drafter

        def wrong(*arguments):
            model = real(*arguments)
            edit(model)
            return model

        patch.setattr(ALGORITHMS[drafter], "new_drafter", wrong)

    return plant


def config_of(drafter: str, edit: Callable) -> Callable:
    """The drafter's configuration is another."""

    def plant(patch) -> None:
        real = ALGORITHMS[drafter].config_of

        def wrong(*arguments):
            config = real(*arguments)
            edit(config)
            return config

        patch.setattr(ALGORITHMS[drafter], "config_of", wrong)

    return plant


def layer_ids(config) -> None:
    name = "aux_hidden_state_layer_ids"
    name = name if hasattr(config, name) else f"eagle_{name}"
    setattr(config, name, [i - 1 for i in getattr(config, name)])


def rope(**parameters) -> Callable:
    def edit(config) -> None:
        layers = config.transformer_layer_config
        layers.rope_parameters = layers.rope_parameters | parameters

    return edit


def rounded_frequencies(model) -> None:
    model.rotary_emb.inv_freq = model.rotary_emb.inv_freq.bfloat16().float()


def sliding(window: int) -> Callable:
    def edit(config) -> None:
        layers = config.transformer_layer_config
        layers.layer_types = ["sliding_attention"] * layers.num_hidden_layers
        layers.sliding_window = window

    return edit


def short_window(model) -> None:
    """One layer slides, though the configuration says nothing of it."""
    model.sliding_window_indices, model.sliding_window = [len(model.layers) - 1], 8
    model.uses_sliding_window_attn = True


def maps(change: Callable) -> Callable:
    def edit(model) -> None:
        model.d2t = change(model.d2t)

    return edit


def absolute(d2t):
    return d2t + torch.arange(len(d2t))


def trained_embedding(model) -> None:
    model.embed_tokens.weight.requires_grad_(True)


def other_head(model) -> None:
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))


def other_targets_file(patch) -> None:
    """head.safetensors of another target under this one's fingerprint."""
    from draftmill import tensor_files

    real = tensor_files.read

    def wrong(path):
        tensors, record = real(path)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)
        return tensors, record

    patch.setattr(tensor_files, "read", wrong)
    patch.setattr(target_head.tensor_files, "read", wrong)


def final_layer(drafter: str) -> Callable:
    """The last of the drafter's layers is the target's, and nobody else looks (layers.py does)."""
    layers = {"small": 4, "block": 3}[drafter]

    def plant(patch) -> None:
        real = drafter_training.read_manifest
        patch.setattr(drafter_training, "check_layers", lambda *arguments: None)
        patch.setattr(
            drafter_training, "read_manifest", lambda path: real(path) | {"layers": layers}
        )

    return plant


def last_among_the_states(patch) -> None:
    real = state_dataset.StateDataset.__getitem__

    def wrong(self, index):
        sample = real(self, index)
        hidden = sample["last"].shape[1]
        return sample | {"aux": torch.cat([sample["aux"][:, hidden:], sample["last"]], -1)}

    patch.setattr(state_dataset.StateDataset, "__getitem__", wrong)


def both(name: str, check: str, make: Callable[[str], Callable], says: str = "", **more) -> list:
    return [Planted(name, drafter, check, make(drafter), says, **more) for drafter in ALGORITHMS]


def one(name: str, drafter: str, check: str, plant: Callable, says: str = "", **more) -> Planted:
    return Planted(name, drafter, check, plant, says, **more)


DPACE = {"training.loss": "ce", "training.position_weights": "dpace"}
PLANTED = [
    *both("noise in place", "noise", noise_in_place, "in place"),
    *both("noise before the head", "noise", lambda d: batch_edit(d, noised_last), "the targets"),
    *both("no noise at all", "noise", no_noise, "do not change with noise"),
    *both(
        "the final layer in fc",
        "layers",
        final_layer,
        "holds the final layer",
    ),
    *both("the last states in fc", "layers", lambda d: last_among_the_states, "block 0"),
    *both("layer ids off by one", "layers", lambda d: config_of(d, layer_ids), "layer ids are"),
    *both("another target's head", "layers", lambda d: other_targets_file, "this target's?"),
    *both("text tokens as targets", "loss", text_targets),
    *both("targets one later", "loss", lambda d: batch_edit(d, later_targets)),
    one("gamma ignored", "block", "loss", flat_gamma),
    one("D-PACE with a gradient", "block", "loss", learnt_dpace, "gradient", changes=DPACE),
    one("slot 0 drafted", "block", "masks", new_drafter("block", slot_0), "slot 0"),
    one("blocks past their document", "block", "masks", everything_scored),
    one("blocks into their neighbour", "block", "masks", neighbours_scored, "another document"),
    one("mask not with the labels", "block", "masks", unaligned_mask, "shift of the loss mask"),
    one(
        "mask not with the labels",
        "small",
        "masks",
        shifted(loss_mask=unshifted_mask),
        "shift of the loss mask",
    ),
    one("first rows scored", "small", "masks", shifted(loss_mask=lambda s, k: s["loss_mask"][1:])),
    one("first rows scored", "small", "loss", shifted(loss_mask=lambda s, k: s["loss_mask"][1:])),
    one("no shift of the states", "small", "states", shifted(aux=lambda s, k: s["aux"][1:])),
    one("own state visible", "block", "states", block_mask(lambda d, t, a: (d, t, a + 1))),
    one(
        "the state before is hidden",
        "block",
        "states",
        block_mask(lambda d, t, a: (d, t, a - 1)),
        "just before",
    ),
    one(
        "other documents visible",
        "block",
        "documents",
        block_mask(lambda d, t, a: (d.clamp(max=0), t, a)),
    ),
    one("other documents visible", "small", "documents", chain_sees_neighbours),
    one("neighbours seen", "small", "packing", chain_sees_neighbours),
    one(
        "neighbours seen",
        "block",
        "packing",
        block_mask(lambda d, t, a: (d.clamp(max=0), t, a)),
    ),
    *both("positions of the row", "rotary", relative_positions, "positions:"),
    *both("another theta", "rotary", lambda d: config_of(d, rope(rope_theta=5e5)), "rope_theta"),
    *both(
        "partial rotary ignored",
        "rotary",
        lambda d: config_of(d, rope(partial_rotary_factor=0.5)),
        "partial_rotary_factor",
    ),
    *both("rounded frequencies", "rotary", lambda d: new_drafter(d, rounded_frequencies)),
    one("a window of 0", "block", "attention", config_of("block", sliding(0)), "sliding_attention"),
    *both("a window of 8", "attention", lambda d: new_drafter(d, short_window), "does not see"),
    *both("absolute d2t", "vocabulary", lambda d: new_drafter(d, maps(absolute)), "offsets"),
    *both("d2t of zeros", "vocabulary", lambda d: new_drafter(d, maps(torch.zeros_like))),
    *both("embedding trained", "frozen", lambda d: new_drafter(d, trained_embedding), "is trained"),
    *both("lm_head of another target", "frozen", lambda d: new_drafter(d, other_head), "lm_head"),
    one(
        "a mask token in the data",
        "block",
        "mask token",
        unchanged,
        "stands in sample",
        changes={"mask_token_id": 1},
    ),
    one(
        "a stop token as the mask token",
        "block",
        "mask token",
        unchanged,
        "stop token",
        changes={"mask_token_id": 2},
    ),
]
