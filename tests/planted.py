"""Faults to plant in the code that trains a drafter, with the check that must name each."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from planted_drafters import (
    absolute,
    config_of,
    final_layer,
    last_among_the_states,
    layer_ids,
    loud,
    maps,
    new_drafter,
    other_head,
    other_targets_file,
    rope,
    rounded_frequencies,
    short_window,
    sliding,
    trained_embedding,
)
from planted_steps import (
    ALGORITHMS,
    batch_edit,
    block_mask,
    chain_sees_neighbours,
    everything_scored,
    flat_gamma,
    later_targets,
    learnt_dpace,
    neighbours_scored,
    no_noise,
    noise_in_place,
    noised_last,
    one_draw,
    others_mask,
    relative_positions,
    shifted,
    slot_0,
    text_targets,
    unaligned_mask,
    unchanged,
    unshifted_mask,
)


@dataclass(frozen=True)
class Planted:
    """plant: edits the code through pytest's monkeypatch. changes: settings of the drafter that it needs."""

    name: str
    drafter: str
    check: str
    plant: Callable
    says: str = ""
    changes: dict = field(default_factory=dict)


def both(name: str, check: str, make: Callable[[str], Callable], says: str = "", **more) -> list:
    return [Planted(name, drafter, check, make(drafter), says, **more) for drafter in ALGORITHMS]


def one(name: str, drafter: str, check: str, plant: Callable, says: str = "", **more) -> Planted:
    return Planted(name, drafter, check, plant, says, **more)


DPACE = {"training.loss": "ce", "training.position_weights": "dpace"}
PLANTED = [
    *both("a neighbour's mask in the batch", "batch", lambda d: others_mask, "loss_mask"),
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
    one(
        "the same anchors in every epoch",
        "block",
        "batch",
        one_draw,
        "anchors of the trainer's first",
    ),
    one("gamma ignored", "block", "loss", flat_gamma),
    one("D-PACE with a gradient", "block", "loss", learnt_dpace, "gradient", changes=DPACE),
    one("slot 0 drafted", "block", "masks", new_drafter("block", slot_0), "from slot 1 on"),
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
    *both("a drafter that shouts", "step 0", lambda d: new_drafter(d, loud), "wrong scale"),
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
