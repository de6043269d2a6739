"""Passes that walk through the layers side by side: each layer is there when it runs, and only then."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from draftmill.lockstep import Lockstep


class Layer(nn.Module):
    """Adds its number; refuses to run while it is not loaded."""

    def __init__(self, number: int):
        super().__init__()
        self.number, self.loaded = number, False

    def forward(self, state: list[int]) -> list[int]:
        assert self.loaded, f"layer {self.number} ran without being loaded"
        return [*state, self.number]


class Machine:
    """Layers with a record of what came in, went out and was hinted at."""

    def __init__(self, count: int):
        self.layers = nn.ModuleList(Layer(i) for i in range(count))
        self.events: list[tuple[str, int]] = []
        self.lockstep = Lockstep(self.layers, self.load, self.free, self.ahead)

    def load(self, index: int) -> None:
        assert not any(layer.loaded for layer in self.layers), "two layers at a time"
        self.layers[index].loaded = True
        self.events.append(("load", index))

    def free(self, index: int) -> None:
        self.layers[index].loaded = False

    def ahead(self, index: int) -> None:
        self.events.append(("ahead", index))

    def walk(self, start: int, order: list[int]) -> list[int]:
        state = [start]
        for index in order:
            state = self.layers[index](state)
        return state


@given(st.integers(1, 7), st.integers(0, 12))
def test_every_layer_is_loaded_once_for_all_passes(layers, passes):
    machine = Machine(layers)
    order = list(range(layers))
    found = machine.lockstep.run(lambda n=n: machine.walk(n, order) for n in range(passes))
    assert found == [[n, *order] for n in range(passes)]
    loads = [index for kind, index in machine.events if kind == "load"]
    assert loads == (order if passes else [])


@given(st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=6))
def test_models_that_visit_layers_again_or_leave_some_out_are_right_all_the_same(orders):
    machine = Machine(4)
    found = machine.lockstep.run(
        lambda n=n, order=order: machine.walk(n, order) for n, order in enumerate(orders)
    )
    assert found == [[n, *order] for n, order in enumerate(orders)]


def test_the_next_layer_is_hinted_at_while_one_is_there():
    machine = Machine(3)
    machine.lockstep.run([lambda: machine.walk(0, [0, 1, 2])])
    assert machine.events == [
        ("load", 0),
        ("ahead", 1),
        ("load", 1),
        ("ahead", 2),
        ("load", 2),
        ("ahead", 0),
    ]


def test_an_error_in_a_pass_ends_all_with_that_error():
    machine = Machine(2)

    def bad() -> None:
        machine.walk(0, [0])
        raise ValueError("of this pass")

    with pytest.raises(ValueError, match="of this pass"):
        machine.lockstep.run([lambda: machine.walk(0, [0, 1]), bad])


def test_after_close_the_layers_run_by_themselves():
    machine = Machine(1)
    machine.lockstep.close()
    machine.layers[0].loaded = True
    assert machine.walk(5, [0]) == [5, 0]
