"""Whether states that a drafter reads were taken after the target's final norm instead of before it.

A drafter normalises what it reads, so acceptance hardly tells; the states themselves do: behind a norm, all
have one length once the norm's weight is divided out.
"""

import torch

from draftmill.errors import DraftmillError

NORM = "norm.weight"
SPREAD = 0.02  # of the lengths, relative to their mean, below which they are one length; bf16 gives 0.004


def check_before_norm(
    samples: list[dict], layers: list[int], head: dict[str, torch.Tensor], where: object
) -> dict[str, float]:
    """The relative spread of the lengths of the states of each layer, the smaller of both conventions of a
    norm's weight (w and 1 + w).

    samples: aux [tokens, layers * hidden] each. head: head.safetensors. Raises DraftmillError for normed states.
    """
    weight = head[NORM].float()
    aux = (
        torch.cat([sample["aux"] for sample in samples]).float().view(-1, len(layers), len(weight))
    )
    found = {}
    for place, layer in enumerate(layers):
        spreads = []
        for scale in (weight, 1 + weight):
            used = scale.abs() > scale.abs().max() / 100
            lengths = (aux[:, place, used] / scale[used]).norm(dim=-1)
            spreads.append(float(lengths.std() / lengths.mean()))
        found[str(layer)] = min(spreads)
        if found[str(layer)] < SPREAD:
            raise DraftmillError(
                f"check: norm: the states of output_of {layer} behind {where} all have one length (spread "
                f"{found[str(layer)]:.1%}), as after the target's final norm; the drafter reads states before it; "
                "look at what extracts them."
            )
    return found
