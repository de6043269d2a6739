"""A drafter's layers started from the target's own: the same weights, the same keys and values, or a refusal."""

import pytest
import torch

from draftmill import dflash, initial_layers, tensor_files
from draftmill.errors import DraftmillError
from draftmill.target_manifest import read_manifest
from draftmill.target_model import load
from draftmill.target_structure import decoder_layers
from mini_road import MiniRoad
from workflow import with_block_drafter

LAYERS = [0, 2]


def started(config: dict, indices: list[int]):
    """A new drafter with these initial layers, the target's manifest and the states it was scaled by."""
    block = with_block_drafter(config, initial_layers=indices, num_layers=len(indices))
    road = MiniRoad(block)
    road.prepare_target()
    manifest = read_manifest(road.target)
    stage = road.stage("train_dflash", drafter="block")
    tensors, _ = tensor_files.read(road.head)
    vocab = manifest["vocab_size"]
    t2d, d2t = torch.ones(vocab, dtype=torch.bool), torch.zeros(vocab, dtype=torch.long)
    made = dflash.config_of(stage.config, manifest, "cpu", vocab)
    drafter = dflash.new_drafter(made, tensors, t2d, d2t, torch.float32)
    width = len(LAYERS) * manifest["hidden_size"]
    aux = torch.randn(30, width, generator=torch.Generator().manual_seed(1))
    dflash.initialise(drafter, stage.config, manifest, tensors, aux)
    return drafter, manifest, tensors, aux


@pytest.fixture
def exact(config) -> dict:
    config["target"]["dtype"] = "float32"
    return config


def target_of(manifest: dict):
    from draftmill.dtype_policy import Ledger

    return load(manifest, "float32", Ledger())


def test_the_first_layer_has_the_keys_and_values_of_the_targets_layer(exact):
    drafter, manifest, _, aux = started(exact, [3, 4])
    layer = decoder_layers(target_of(manifest))[3]
    states = aux[:, manifest["hidden_size"] :]  # output of layer 2: what enters layer 3
    context = drafter.hidden_norm(drafter.fc(aux))
    expected = layer.input_layernorm(states)
    torch.testing.assert_close(context, expected, atol=1e-5, rtol=1e-5)
    own = drafter.layers[0].self_attn
    torch.testing.assert_close(own.k_proj(context), layer.self_attn.k_proj(expected))
    torch.testing.assert_close(own.v_proj(context), layer.self_attn.v_proj(expected))


def test_every_part_of_every_layer_is_the_targets(exact):
    drafter, manifest, tensors, _ = started(exact, [3, 1])
    layers = decoder_layers(target_of(manifest))
    for own, index in zip(drafter.layers, [3, 1], strict=True):
        for name in (*initial_layers.LINEAR, *initial_layers.NORMS):
            found, wanted = own.get_submodule(name).weight, layers[index].get_submodule(name).weight
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(drafter.norm.weight, tensors["norm.weight"], atol=1e-4, rtol=1e-4)


def test_queries_and_keys_without_a_norm_keep_their_size(exact):
    drafter, manifest, _, aux = started(exact, [3])
    layer = decoder_layers(target_of(manifest))[3]
    states = layer.input_layernorm(aux[:, manifest["hidden_size"] :])
    for kind in ("q", "k"):
        heads = layer.self_attn.get_submodule(f"{kind}_proj")(states)
        norm = drafter.layers[0].self_attn.get_submodule(f"{kind}_norm")
        heads = heads.unflatten(-1, (-1, len(norm.weight)))
        size, kept = heads.square().mean().sqrt(), norm(heads).square().mean().sqrt()
        assert float(kept / size) == pytest.approx(1, rel=0.1)


def test_a_targets_own_query_norms_are_taken(family, config):
    config["target"] = {"path": str(family("qwen3")), "dtype": "float32"}
    drafter, manifest, _, _ = started(config, [1])
    layer = decoder_layers(target_of(manifest))[1]
    found, wanted = drafter.layers[0].self_attn.q_norm.weight, layer.self_attn.q_norm.weight
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_norm_that_stores_one_less_is_taken_for_what_it_does(family):
    target = target_of(
        {"checkpoint": str(family("gemma3")), "dtype": "float32", "trust_remote_code": False}
    )
    norm = decoder_layers(target)[0].input_layernorm
    found = initial_layers.scale_of(norm, "a norm")
    torch.testing.assert_close(found, 1 + norm.weight.detach().float(), atol=1e-4, rtol=1e-4)


def test_a_layer_norm_is_refused():
    with pytest.raises(DraftmillError, match="layer 2: input_layernorm is no RMS norm"):
        initial_layers.scale_of(torch.nn.LayerNorm(32), "layer 2: input_layernorm")


def test_layers_of_another_kind_are_refused(family, config):
    config["target"] = {"path": str(family("deepseek_v3"))}
    with pytest.raises(
        DraftmillError, match="initial_layers names layers of the target that are not"
    ):
        started(config, [1])


def test_a_layer_that_the_target_lacks_is_refused(config):
    with pytest.raises(DraftmillError, match="layer 9 of the target, which has"):
        started(config, [9])
