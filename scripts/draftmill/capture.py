"""The target's hidden states: hooks on its decoder layers, one forward pass of the text decoder.

No logits are made, and the hooks keep only what is asked for. Layer i means the OUTPUT of decoder layer
i, counted from 0 (the residual stream); "last" is what enters the final norm.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from draftmill.devices import is_the_machines
from draftmill.errors import DraftmillError
from draftmill.target_structure import decoder_layers, final_norm, text_decoder

# of the running pass: passes may run side by side (lockstep.py), each in a context of its own
_found: ContextVar[dict | None] = ContextVar("captured states", default=None)


class Capture:
    """Collects the states of the wanted layers of a model.

    keep: what to do with a state at once, at its layer (to put it on disk, for example).
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[int],
        keep: Callable[[torch.Tensor], Any] = lambda state: state,
    ):
        self.decoder = text_decoder(model)
        self.layers = layers
        self.keep = keep
        norm = final_norm(model)
        self._hooks = [
            decoder_layers(model)[layer].register_forward_hook(self._output_hook(layer))
            for layer in layers
        ]
        self._hooks.append(norm.register_forward_pre_hook(self._last_hook, with_kwargs=True))
        self._hooks.append(norm.register_forward_hook(self._norm_hook))

    def _output_hook(self, layer: int):
        def hook(module, args, output) -> None:
            state = output[0] if isinstance(output, tuple) else output
            self._put(layer, state, f"layer {layer}")

        return hook

    def _last_hook(self, module, args, kwargs) -> None:
        self._put("last", args[0] if args else next(iter(kwargs.values())), "the last layer")

    def _norm_hook(self, module, args, output) -> None:
        if (found := _found.get()) is not None:
            found["normed"] = output

    def _put(self, key: int | str, state: torch.Tensor, name: str) -> None:
        found = _found.get()
        if found is None:
            return  # a pass that is not captured
        expected = found["shape"]
        if state.dim() != 3 or state.shape[:2] != expected:
            raise DraftmillError(
                f"capture: the state of {name} has shape {tuple(state.shape)}, expected "
                f"[{expected[0]}, {expected[1]}, hidden]; a residual stream of another form is not "
                "supported."
            )
        found[key] = self.keep(state)

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None) -> list[Any]:
        """ids, mask: int64 [batch, tokens], padded on the right. Returns what `keep` made of the states of
        each layer and of "last", each [batch, tokens, hidden].

        Raises DraftmillError where the decoder does anything between its final norm and its output: logits
        from stored states would not be the model's.
        """
        found = {"shape": ids.shape}
        token = _found.set(found)
        try:
            output = self.decoder(input_ids=ids, attention_mask=mask, use_cache=False)
        except (AttributeError, LookupError, TypeError, RuntimeError) as error:
            if is_the_machines(error):
                raise
            raise DraftmillError(
                f"capture: {type(self.decoder).__name__} does not run on token ids alone ({error}); this "
                "family is not supported."
            ) from error
        finally:
            _found.reset(token)
        missing = [key for key in (*self.layers, "last") if key not in found]
        normed = found.get("normed")
        # the same tensor, most often; values that are not finite are the gate's to name
        if missing or not (output[0] is normed or torch.equal(output[0].to(normed.device), normed)):
            raise DraftmillError(
                f"capture: {type(self.decoder).__name__} does not return its final norm's output "
                f"(never seen: {missing}), so logits from stored states would not be the model's; this "
                "family is not supported."
            )
        return [found[key] for key in (*self.layers, "last")]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
