"""The layers that published drafters read, in this project's convention (`output_of`, from 0)."""

from draftmill.errors import DraftmillError

DFLASH_LAYERS = 5


def eagle3_layers(count: int) -> list[int]:
    """EAGLE-3's low, middle and high layer of a target with `count` decoder layers.

    speculators' ids are 2, count // 2 and count - 3: indices of what ENTERS a layer, so the output of the
    layer before it. Raises DraftmillError where the target has one layer.
    """
    return allowed([2 - 1, count // 2 - 1, count - 3 - 1], count)


def dflash_layers(count: int, layers: int = DFLASH_LAYERS) -> list[int]:
    """DFlash's `layers` layers, spread evenly from the second to the third-last; z-lab's ids already count
    outputs. Raises DraftmillError where the target has one layer."""
    if layers == 1:
        return allowed([count // 2], count)
    spread = (count - 4) / (layers - 1)
    return allowed([round(1 + i * spread) for i in range(layers)], count)


def allowed(wanted: list[int], count: int) -> list[int]:
    """Those layers, ascending and once each, moved into what a capture may name: never the last layer."""
    if count < 2:
        raise DraftmillError(
            f"target: has {count} decoder layer, and its output is what a drafter must not read; a target "
            "of at least 2 layers is needed."
        )
    return sorted({min(max(layer, 0), count - 2) for layer in wanted})
