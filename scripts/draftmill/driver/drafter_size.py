"""How large a drafter is: speculators' own model on the meta device, from a config.json alone."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from draftmill import algorithms
from draftmill.driver.target_size import TargetSize
from draftmill.errors import DraftmillError

FROZEN = ("embed_tokens.", "lm_head.")  # the target's, not trained
KEYS = ("k_proj.", "v_proj.")


@dataclass(frozen=True)
class DrafterSize:
    """Parameter counts.

    multiplied: what one token is multiplied with in one drafting step, lm_head included, embedding (a look-up)
    not. head: lm_head. fc: what joins the target's states. body: layers and norms. keys: the part of the layers
    that a context token of a block drafter passes as well. kept_bytes: what one token's way through the layers
    keeps for the backward pass (mixed precision, measured).
    """

    trained: int
    frozen: int
    multiplied: int
    head: int
    fc: int
    body: int
    keys: int
    kept_bytes: int

    @property
    def total(self) -> int:
        return self.trained + self.frozen


def drafter_size(
    settings: dict, layers: list[int], target: object, size: TargetSize
) -> DrafterSize:
    """The size of a drafter of the configuration that is trained.

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
        return counted(algorithm.empty(config))


def foreign_size(settings: dict, size: TargetSize) -> DrafterSize | None:
    """The size of a drafter of others, from its config.json; None where that is not in a local folder.

    Raises DraftmillError where the drafter would be refused for what that says.
    """
    if not settings["path"]:
        return None
    about = {
        "name": size.architecture,
        "architectures": [size.architecture],
        "hidden_size": size.hidden,
        "vocab_size": size.vocab,
        "embedding_rows": size.embedding // size.hidden,
        "layers": size.layers,
    }
    module = algorithms.load(settings["algorithm"], "foreign_")
    layers = settings["layers"]["output_of"]
    config, _ = module.described(Path(settings["path"]), about, layers)
    return counted(module.skeleton(config))


def counted(model: nn.Module) -> DrafterSize:
    counts = {name: p.numel() for name, p in model.named_parameters()}

    def share(prefix: tuple[str, ...] | str) -> int:
        return sum(n for name, n in counts.items() if name.startswith(prefix))

    frozen, head, fc = share(FROZEN), share("lm_head."), share("fc.")
    trained = sum(counts.values()) - frozen
    keys = sum(n for name, n in counts.items() if any(key in name for key in KEYS))
    layer = model.config.transformer_layer_config
    width = layer.num_attention_heads * (
        layer.head_dim or layer.hidden_size // layer.num_attention_heads
    )
    kept = 28 * layer.hidden_size + 9 * layer.intermediate_size + 18 * width
    return DrafterSize(
        trained=trained,
        frozen=frozen,
        multiplied=trained + head,
        head=head,
        fc=fc,
        body=trained - fc,
        keys=keys,
        kept_bytes=kept * layer.num_hidden_layers,
    )
