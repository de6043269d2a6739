"""Many forward passes that walk through a model's layers side by side, one layer in memory at a time.

Each pass is the model's own forward, run in a greenlet that halts before every decoder layer until that
layer is there. Nothing is assumed of what the family's code hands from layer to layer (masks, rotary
angles, shared caches): it stays in that forward's own variables.
"""

from collections.abc import Callable, Iterable
from typing import Any

from greenlet import greenlet
from torch import nn


class Lockstep:
    """Runs passes over `layers`; `load(i)` and `free(i)` bring layer i in and out, `ahead(i)` hints that it
    comes next. All run in the caller's thread."""

    def __init__(
        self,
        layers: nn.ModuleList,
        load: Callable[[int], None],
        free: Callable[[int], None],
        ahead: Callable[[int], None],
    ):
        self.count = len(layers)
        self.load, self.free, self.ahead = load, free, ahead
        self.hooks = [
            layer.register_forward_pre_hook(self._halt(i)) for i, layer in enumerate(layers)
        ]

    def _halt(self, index: int):
        def hook(module: nn.Module, args: tuple) -> None:
            greenlet.getcurrent().parent.switch(index)

        return hook

    def run(self, passes: Iterable[Callable[[], Any]]) -> list[Any]:
        """The passes' results, in order. An error in one of them ends all."""
        results: dict[int, Any] = {}
        waiting: dict[int, list[tuple[int, greenlet]]] = {}

        def go(number: int, running: greenlet, *arguments) -> None:
            found = running.switch(*arguments)
            if running.dead:
                results[number] = found
            else:
                waiting.setdefault(found, []).append((number, running))

        for number, one in enumerate(passes):
            go(number, greenlet(one))
        while waiting:
            index = min(waiting)
            ready = waiting.pop(index)
            self.load(index)
            self.ahead((index + 1) % self.count)
            for number, running in ready:
                go(number, running)
            self.free(index)
        return [results[number] for number in sorted(results)]

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
