"""EAGLE-3: speculators' drafter and loss, with the target's own head in place of its copy of one.

Conventions met here: our layer i is the OUTPUT of decoder layer i; speculators' id is the index into
`hidden_states`, so the INPUT of that layer: one higher. A sample (x, g, y, l) of ids, aux states, last
states and loss mask is shifted to (x[1:], g[:-1], y[1:], l[1:]), positions from 1 (speculators,
models/eagle3/data.py): row j holds token j+1 with the state of token j, and predicts token j+2.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from torch import nn
from torch.nn import functional

from draftmill import exported_drafter, speculators_drafter
from draftmill.drafter_layers import drafter_layers
from draftmill.errors import DraftmillError
from draftmill.input_noise import noised
from draftmill.predictions import Predictions
from draftmill.speculators_drafter import empty, proposal, verifier_of
from draftmill.target_head import TargetHead

DRAFTING = "chain"
ATTENTION = {"cpu": "sdpa", "cuda": "simple_flex_attention"}  # flex has no backward on a CPU
FLEX_BLOCK = 128  # flex attention's masks are made of whole blocks


def config_of(
    settings: dict, manifest: dict, device: str, draft_vocab_size: int
) -> Eagle3SpeculatorConfig:
    """speculators' configuration of a new drafter for this target."""
    decoder = drafter_layers(manifest, settings["num_layers"], "llama")
    decoder._attn_implementation = ATTENTION[device]
    return Eagle3SpeculatorConfig(
        transformer_layer_config=decoder,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=settings["norm_before_residual"],
        norm_before_fc=settings["norm_before_fc"],
        eagle_aux_hidden_state_layer_ids=[i + 1 for i in settings["layers"]["output_of"]],
        speculators_config=proposal("eagle3", settings["ttt_steps"], verifier_of(manifest)),
    )


def new_drafter(
    config: Eagle3SpeculatorConfig,
    head: dict[str, torch.Tensor],
    t2d: torch.Tensor,
    d2t: torch.Tensor,
    dtype: torch.dtype,
) -> Eagle3DraftModel:
    """A drafter with random layers and the target's embedding and lm_head rows, both frozen."""
    check_full_attention(config)
    return speculators_drafter.new_drafter(config, head, t2d, d2t, dtype)


def initialise(
    drafter: Eagle3DraftModel,
    settings: dict,
    manifest: dict,
    tensors: dict[str, torch.Tensor],
    aux: torch.Tensor,
) -> None:
    """EAGLE-3 starts from random layers."""


def check_full_attention(config: Eagle3SpeculatorConfig) -> None:
    kinds = config.transformer_layer_config.layer_types or ["full_attention"]
    if set(kinds) != {"full_attention"}:
        raise DraftmillError(
            f"drafter: its layers are {', '.join(sorted(set(kinds)))}, expected full_attention in every "
            "layer; a sliding window of 0 trains without an error and costs a fifth of tau."
        )


def heads(drafter: Eagle3DraftModel) -> list[nn.Module]:
    """What makes logits of the drafter's states."""
    return [drafter.lm_head]


def entry(drafter: Eagle3DraftModel) -> nn.Module:
    """The module that the target's states enter: where their dtype is checked."""
    return drafter


class WithTargets(nn.Module):
    """A drafter whose training targets come from the target's own head."""

    def __init__(self, drafter: Eagle3DraftModel, head: TargetHead, settings: dict):
        super().__init__()
        self.drafter = drafter
        object.__setattr__(self, "head", head)  # not a submodule: never trained, saved or cast
        # losses, accuracies and their reductions in fp32, whatever the weights are
        drafter.lm_head.register_forward_hook(lambda module, args, logits: logits.float())
        self.options = {
            "ttt_steps": settings["ttt_steps"],
            "ttt_step_loss_decay": settings["training"]["ttt_loss_decay"],
            "loss_config": resolve_loss_config(settings["training"]["loss"], "eager"),
        }
        self.noise = settings["training"]["noise"]

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
        """Loss (fp32 scalar) and speculators' metrics of a packed batch (see packing.pack)."""
        loss, metrics, _ = self._passed(batch)
        return loss, metrics | {"scored": batch["loss_mask"].sum()}

    def _passed(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict, torch.Tensor]:
        """Loss, metrics and the target's logits [1, tokens, draft vocabulary]."""
        with torch.no_grad():
            targets = self.head(batch["last"])
        aux = noised(batch["aux"], self.noise) if self.training else batch["aux"]
        _, loss, metrics = self.drafter(
            hidden_states=aux,
            input_ids=batch["input_ids"],
            document_ids=batch["document_ids"],
            loss_mask=batch["loss_mask"],
            position_ids=batch["position_ids"],
            # passed through the identities above, so these are the target's logits, not states
            verifier_last_hidden_states=targets,
            **self.options,
        )
        return loss, metrics, targets

    def predict(self, batch: dict[str, torch.Tensor]) -> Predictions:
        """The drafts of every training-time-test step, in the order of the steps, then of the rows.

        At step k, row j has the states up to its own and drafts the token of row j + 1 + k, whose target is the
        target's logits at row j + k.
        """
        logits: list[torch.Tensor] = []
        hook = self.drafter.lm_head.register_forward_hook(lambda m, a, out: logits.append(out))
        try:
            _, _, targets = self._passed(batch)
        finally:
            hook.remove()
        rows = torch.arange(targets.shape[1], device=targets.device)
        parts = []
        for k, drafted in enumerate(logits):
            there = (rows + k < len(rows)) & batch["loss_mask"][0].roll(-k)
            weights = there * self.options["ttt_step_loss_decay"] ** k / (there.sum() + 1e-5)
            goal = targets[0].float().roll(-k, 0)
            parts.append((drafted[0].float(), goal, weights.float(), rows + 1 + k, rows + 1))
        return Predictions(*(torch.cat(part) for part in zip(*parts, strict=True)))


def prepared(settings: dict) -> Callable[[dict, str], dict]:
    """What makes a sample what EAGLE-3 sees: (sample, draw) -> the shifted sample; nothing is drawn."""
    return lambda sample, draw: shifted(sample, settings["ttt_steps"])


def length(tokens: int) -> int:
    """Rows of a prepared sample."""
    return tokens - 1


def shifted(sample: dict[str, torch.Tensor], ttt_steps: int) -> dict[str, torch.Tensor]:
    """A sample as EAGLE-3 sees it: (x[1:], g[:-1], y[1:], l[1:]), positions from 1.

    The first ttt_steps - 1 rows carry no loss: in a pack, the last rows of the sample before are scored
    against them at the later steps.
    """
    tokens = len(sample["input_ids"])
    loss_mask = sample["loss_mask"][1:].clone()
    loss_mask[: ttt_steps - 1] = False
    return {
        "input_ids": sample["input_ids"][1:],
        "aux": sample["aux"][:-1],
        "last": sample["last"][1:],
        "loss_mask": loss_mask,
        "position_ids": torch.arange(1, tokens),
    }


def load(folder: Path, device: str) -> Eagle3DraftModel:
    """An exported drafter, every weight from its file, in the dtypes of that file."""
    config = exported_drafter.read_config(folder)
    config.transformer_layer_config._attn_implementation = ATTENTION[device]
    check_full_attention(config)
    return exported_drafter.filled(empty(config), folder).to(device)


def check_target(model: Eagle3DraftModel, manifest: dict, layers: list[int], folder: Path) -> None:
    """Refuses a drafter that was made for another target, whatever fingerprints it carries.

    layers: output_of of the states it is to read. Raises DraftmillError that names both.
    """
    ids = model.config.eagle_aux_hidden_state_layer_ids
    exported_drafter.check_target(model, ids, manifest, layers, folder)


@torch.inference_mode()
def drafts(
    model: Eagle3DraftModel,
    sample: dict[str, torch.Tensor],
    steps: int,
    start: int = 1,
    end: int | None = None,
) -> torch.Tensor:
    """What the drafter would propose at every position of a sample, in one teacher-forced pass.

    sample: input_ids [tokens], aux [tokens, layers * hidden]. start and end change nothing: a chain's
    drafts do not depend on how many follow, and all rows are drafted at once.
    Returns int64 [tokens - 1, steps]: row j, with token j+1 the last one known, holds the target
    vocabulary's ids of the drafts for tokens j+2, j+3, ...

    A draft chain's first mismatch ends it, so feeding the text's own tokens in place of the drafts gives
    the accepted prefix exactly.
    """
    ids, aux = sample["input_ids"][1:], sample["aux"][:-1]
    device, count = model.fc.weight.device, len(ids)
    padding = -count % FLEX_BLOCK if device.type == "cuda" else 0
    documents = torch.zeros(count, dtype=torch.long)
    proposals = model(
        hidden_states=functional.pad(aux, (0, 0, 0, padding))[None].to(device),
        input_ids=functional.pad(ids, (0, padding))[None].to(device),
        document_ids=functional.pad(documents, (0, padding), value=-1)[None].to(device),
        position_ids=torch.arange(1, count + padding + 1, device=device)[None],
        ttt_steps=steps,
    )
    found = torch.stack([p[0, :count] for p in proposals], dim=1)
    return (found if model.d2t is None else found + model.d2t[found]).cpu()
