"""The one dtype policy.

The target, the stored hidden states, the drafter's compute and the exported checkpoint have the declared
dtype (bfloat16 unless the configuration says float32); master weights, optimizer state, losses, softmax
and reductions are float32. A component in another dtype stops the stage that meets it. The reason: bf16
states fed to fp32 weights run without an error in places, and cost weeks elsewhere.
"""

import torch
from torch import nn

from draftmill.errors import DraftmillError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
BYTES = {"bfloat16": 2, "float32": 4}


def name_of(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


class Ledger(dict):
    """What each component of a stage was seen to be: component -> dtype name."""

    def expect(self, component: str, found: torch.dtype | str, declared: str) -> None:
        """Writes the component down; raises DraftmillError where it is not as declared."""
        self[component] = name_of(found)
        if self[component] != declared:
            raise DraftmillError(
                f"dtype: {component} is {self[component]}, but must be {declared}; mixed dtypes give "
                "silently different numbers, so nothing was computed from it."
            )

    def expect_module(self, component: str, module: nn.Module, declared: str) -> None:
        """The same for every floating-point parameter and buffer of a module, named in the error."""
        tensors = [*module.named_parameters(), *module.named_buffers()]
        for name, tensor in tensors:
            if tensor.is_floating_point():
                wanted = "float32" if kept_in_float32(name) else declared
                self.expect(f"{component} ({name})", tensor.dtype, wanted)
                del self[f"{component} ({name})"]
        self[component] = declared

    def watch_inputs(self, component: str, module: nn.Module, declared: str):
        """Checks every floating-point tensor that enters a module from now on; returns the hook."""

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    self.expect(component, value.dtype, declared)

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def watch_compute(self, component: str, layer: nn.Module, declared: str):
        """Checks what a layer computes in from now on: autocast's dtype where that is on, else its
        weight's; returns the hook."""

        def hook(module: nn.Module, args: tuple) -> None:
            device = module.weight.device.type
            autocast = torch.is_autocast_enabled(device)
            found = torch.get_autocast_dtype(device) if autocast else module.weight.dtype
            self.expect(component, found, declared)

        return layer.register_forward_pre_hook(hook)

    def watch_output(self, component: str, module: nn.Module, declared: str):
        """Checks the tensor that leaves a module from now on; returns the hook."""
        return module.register_forward_hook(
            lambda module, args, output: self.expect(component, output.dtype, declared)
        )


def kept_in_float32(name: str) -> bool:
    """Rotary frequencies: transformers makes them in float32 in every model, and bf16 ones give other
    angles than those that serve the drafter."""
    return name.endswith("inv_freq")


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts parameters and buffers in place, but for what is kept in float32.

    module.to(dtype) would take the rotary frequencies along.
    """
    kept = {n: b for n, b in module.named_buffers() if kept_in_float32(n)}
    module.to(dtype)
    for name, buffer in kept.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, buffer)
    return module
