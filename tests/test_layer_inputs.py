"""What enters the layers, watched for the gate: on any device, under any name, and only while it is wanted."""

import pytest
import torch
from transformers import LlamaForCausalLM

from draftmill.layer_inputs import LayerInputs, picked_rows
from draftmill.target_structure import decoder_layers

IDS = torch.arange(3, 43)[None]
ROWS = picked_rows(40)


@pytest.fixture
def model(tiny_target) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


def same(found: dict, model: LlamaForCausalLM, layer: int) -> bool:
    """Whether the output of `layer` was found, compared with the model's own list of states."""
    with torch.inference_mode():
        states = model(input_ids=IDS, output_hidden_states=True).hidden_states
    return torch.equal(found["states"][layer], states[layer + 1][0, ROWS])


def test_the_states_found_are_the_outputs_of_the_layers_before(model):
    watch = LayerInputs(model, [1])
    with torch.inference_mode():
        found = watch(model, IDS, ROWS)
    watch.close()
    assert same(found, model, 0)
    assert same(found, model, 1)
    with torch.inference_mode():
        assert torch.equal(found["argmax"], model(input_ids=IDS).logits[0, ROWS].argmax(-1))


def test_a_layer_that_names_its_states_otherwise_is_watched_too(model):
    layer = decoder_layers(model)[2]
    own = layer.forward
    renamed = layer.register_forward_pre_hook(
        lambda _, args, kwargs: ((), {"stream": args[0]} | kwargs), with_kwargs=True
    )
    layer.forward = lambda stream, **others: own(stream, **others)
    watch = LayerInputs(model, [1])
    with torch.inference_mode():
        found = watch(model, IDS, ROWS)
    watch.close()
    renamed.remove()
    layer.forward = own
    assert same(found, model, 1)


def test_the_rows_wanted_are_no_tensor_that_a_device_map_would_move(model):
    asked = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: asked.append(kwargs["logits_to_keep"]), with_kwargs=True
    )
    with torch.inference_mode():
        LayerInputs(model, [1])(model, IDS, ROWS)
    assert asked == [ROWS.tolist()]


def test_after_close_the_model_runs_unwatched(model):
    before = [len(m._forward_pre_hooks) for m in model.modules()]
    watch = LayerInputs(model, [0, 1])
    assert [len(m._forward_pre_hooks) for m in model.modules()] != before
    watch.close()
    assert [len(m._forward_pre_hooks) for m in model.modules()] == before
    model(input_ids=IDS)
