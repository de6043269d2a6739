"""The target's hidden states: hooks on its decoder layers, one forward pass of the text decoder.

No logits are made, and the hooks keep only what is asked for. Layer i means the OUTPUT of decoder layer
i, counted from 0 (the residual stream); "last" is what enters the final norm.
"""

import torch
from torch import nn

from draftmill.errors import DraftmillError
from draftmill.target_model import decoder_layers, final_norm, text_decoder


class Capture:
    """Collects the states of the wanted layers of a model."""

    def __init__(self, model: nn.Module, layers: list[int]):
        self.decoder = text_decoder(model)
        self.layers = layers
        self._found: dict = {}
        self._hooks = [
            decoder_layers(model)[layer].register_forward_hook(self._output_hook(layer))
            for layer in layers
        ]
        self._hooks.append(final_norm(model).register_forward_pre_hook(self._last_hook))

    def _output_hook(self, layer: int):
        def hook(module, args, output) -> None:
            self._found[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def _last_hook(self, module, args) -> None:
        self._found["last"] = args[0]

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
        """ids, mask: int64 [batch, tokens], padded on the right. Returns the states of each layer and
        of "last", each [batch, tokens, hidden]."""
        self._found.clear()
        self.decoder(input_ids=ids, attention_mask=mask, use_cache=False)
        states = [self._found.pop(key) for key in (*self.layers, "last")]
        for key, state in zip((*self.layers, "last"), states, strict=True):
            if state.dim() != 3 or state.shape[:2] != ids.shape:
                raise DraftmillError(
                    f"capture: the state of layer {key} has shape {tuple(state.shape)}, expected "
                    f"[{ids.shape[0]}, {ids.shape[1]}, hidden]; this target is not supported yet."
                )
        return states

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
