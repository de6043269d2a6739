"""How large a drafter is: speculators' own model on the meta device, built from the target's config.json."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from draftmill import algorithms
from draftmill.driver.target_size import TargetSize
from draftmill.errors import DraftmillError

FROZEN = ("embed_tokens.", "lm_head.")  # the target's, not trained


@dataclass(frozen=True)
class DrafterSize:
    """Parameter counts. multiplied: what one token is multiplied with in one drafting step, lm_head
    included, embedding (a look-up) not."""

    trained: int
    frozen: int
    multiplied: int

    @property
    def total(self) -> int:
        return self.trained + self.frozen


def drafter_size(
    settings: dict, layers: list[int], target: object, size: TargetSize
) -> DrafterSize:
    """The size of a drafter of the configuration.

    settings: its section of `drafters`. target: the target's transformers configuration.
    Raises DraftmillError where speculators can derive no drafter from it.
    """
    with tempfile.TemporaryDirectory() as folder:
        # speculators reads the target's configuration from a folder
        Path(folder, "config.json").write_text(json.dumps(target.to_dict(), default=str))
        about = {"checkpoint": folder, "trust_remote_code": False, "name": size.architecture}
        slice_ = settings | {"layers": {"output_of": layers}}
        if settings.get("mask_token_id", 0) is None:
            slice_["mask_token_id"] = 0  # any: it is chosen when training starts
        algorithm = algorithms.load(settings["algorithm"])
        vocab = min(settings["draft_vocab_size"] or size.vocab, size.vocab)
        try:
            config = algorithm.config_of(slice_, about, "cpu", vocab)
        except (AttributeError, TypeError, ValueError) as error:  # no attention heads, for example
            raise DraftmillError(
                f"target: speculators can derive no drafter from model_type '{target.model_type}' "
                f"({str(error).splitlines()[0]}), so training would stop; take another target."
            ) from error
    with torch.device("meta"):
        model = algorithm.empty(config)
    counts = {name: p.numel() for name, p in model.named_parameters()}
    frozen = sum(n for name, n in counts.items() if name.startswith(FROZEN))
    trained = sum(counts.values()) - frozen
    head = sum(n for name, n in counts.items() if name.startswith("lm_head."))
    return DrafterSize(trained, frozen, trained + head)
