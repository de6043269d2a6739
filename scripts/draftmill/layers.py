"""Layers of a target, in the one written convention: output_of i is the OUTPUT of decoder layer i, from 0."""

from draftmill.errors import DraftmillError


def check_layers(layers: list[int], count: int, capture: str) -> None:
    """Refuses layers that the target lacks, and its last one, which would hand over the answer."""
    if layers != sorted(layers):
        raise DraftmillError(
            f"config: {capture} names output_of {layers}; write them in ascending order, since serving "
            "engines concatenate the states so, whatever the order in a checkpoint."
        )
    for layer in layers:
        if layer >= count:
            raise DraftmillError(
                f"config: {capture} names output_of {layer}, but the target has {count} decoder "
                f"layers, 0 to {count - 1}."
            )
        if layer == count - 1:
            raise DraftmillError(
                f"config: {capture} names output_of {layer}, the target's final layer: a "
                "drafter that reads it reads the answer; name layers below it."
            )
