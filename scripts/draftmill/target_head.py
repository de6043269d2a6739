"""The target's exact head: logits from stored states by the family's own code.

The family's forward runs with its decoder replaced by a stub that returns the normalised state, so that
scale, bias and softcap are the model's own. Only the final norm and lm_head have weights.
"""

from pathlib import Path

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from draftmill import tensor_files
from draftmill.dtype_policy import name_of
from draftmill.errors import DraftmillError
from draftmill.stage import Stage
from draftmill.target_structure import final_norm, model_of, output_head, text_decoder


def read(path: str | Path, stage: Stage) -> dict[str, torch.Tensor]:
    """The tensors of head.safetensors, refused where they are not the planned target's."""
    tensors, record = tensor_files.read(path)
    stage.expect("target", path, record["fingerprint"])
    return tensors


class StubOutput(BaseModelOutputWithPast):
    """What the stubbed decoder returns; families ask it for outputs of their own (router logits, image
    states), of which it has none."""

    def __getattr__(self, name: str) -> None:
        return None


class TargetHead(nn.Module):
    """Pre-norm states -> the target's logits.

    Built from the target's manifest and head.safetensors. `rows`, bool of shape [vocab], keeps only
    those rows of lm_head: the logits of a draft vocabulary.
    """

    def __init__(self, manifest: dict, tensors: dict[str, torch.Tensor], rows=None):
        super().__init__()
        model = model_of(manifest)
        self.norm = with_weights(final_norm(model), tensors, "norm.")
        head = with_weights(output_head(model), tensors, "lm_head.", rows)
        self.lm_head = head
        self._states: torch.Tensor | None = None
        owner = next(m for m in model.modules() if any(c is head for c in m.children()))
        decoder = text_decoder(model)
        for module in owner.modules():
            if module is not owner and any(m is decoder for m in module.modules()):
                module.forward = self._stub
        object.__setattr__(self, "_owner", owner)  # not a submodule: its decoder stays on meta

    def _stub(self, *args, **kwargs) -> StubOutput:
        return StubOutput(last_hidden_state=self._states)

    @property
    def dtype(self) -> str:
        return name_of(self.lm_head.weight.dtype)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """states [batch, tokens, hidden], before the final norm -> logits [batch, tokens, rows] in the dtype of
        the head."""
        self._states = self.norm(states)
        ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
        try:
            logits = self._owner(input_ids=ids, use_cache=False).logits
        finally:
            self._states = None
        if logits.is_meta:
            raise DraftmillError(
                f"target head: {type(self._owner).__name__} has weights between its final norm and its "
                "logits beside lm_head, which is not supported."
            )
        # some families widen them at the very end
        return logits.to(self.lm_head.weight.dtype)


def with_weights(module: nn.Module, tensors: dict, prefix: str, rows=None) -> nn.Module:
    """Gives a module on the meta device its weights from `tensors`."""
    for name, parameter in list(module.named_parameters()):
        if prefix + name not in tensors:
            raise DraftmillError(f"target head: lacks {prefix}{name}; rebuild the target.")
        weight = tensors[prefix + name]
        if weight.shape != parameter.shape:
            raise DraftmillError(
                f"target head: {prefix}{name} has shape {tuple(weight.shape)}, but the model needs "
                f"{tuple(parameter.shape)}; it belongs to another target."
            )
        weight = weight if rows is None else weight[rows]
        setattr(module, name, nn.Parameter(weight, requires_grad=False))
    return module
