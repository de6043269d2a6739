"""Size, operations and memory of drafters in a plan, against modules, operations and bytes that torch counts."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig

from draftmill import dflash
from draftmill.driver import drafter_cost
from draftmill.driver.drafter_size import counted, drafter_size, foreign_size
from draftmill.driver.estimate_text import text_of
from draftmill.driver.target_description import target_config
from draftmill.driver.target_size import target_size
from draftmill.driver.token_estimate import TokenEstimate
from draftmill.target_manifest import read_manifest
from foreign_checkpoints import LAYERS, Target, dflash_checkpoint
from planning import hub_source, planned
from workflow import with_block_drafter

TOKENS, ANCHORS, BLOCK, VOCAB, HIDDEN = 120, 60, 8, 600, 96


class Head(nn.Module):
    """A target's head that multiplies nothing: its operations are the target's."""

    def forward(self, last: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*last.shape[:-1], VOCAB, dtype=torch.bfloat16)


@pytest.fixture
def settings() -> dict:
    training = {"noise": 0.0, "loss": "ce", "position_weights": "exponential", "gamma": None}
    training |= {"tokens_per_batch": TOKENS, "anchors": ANCHORS, "steps": 1}
    training |= {"gradient_accumulation": 1, "precision": "mixed"}
    return {
        "algorithm": "dflash",
        "num_layers": 3,
        "sliding_window": None,
        "block_size": BLOCK,
        "mask_token_id": 1,
        "draft_vocab_size": None,
        "draft_tokens": BLOCK - 1,
        "layers": {"output_of": [0, 2]},
        "training": training,
    }


@pytest.fixture
def drafter(settings, tmp_path):
    """A drafter whose matrices outweigh the rest, and its size as it is planned."""
    target = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    target.save_pretrained(tmp_path / "target")
    about = {"checkpoint": str(tmp_path / "target"), "trust_remote_code": False, "name": "a"}
    model = dflash.empty(dflash.config_of(settings, about, "cpu", VOCAB))
    for frozen in (model.embed_tokens, model.lm_head):
        frozen.weight.requires_grad_(False)
    size = target_size(target, "bfloat16")
    return model, drafter_size(settings, [0, 2], target, size), size


def batch() -> dict[str, torch.Tensor]:
    anchors = torch.zeros(1, TOKENS, dtype=torch.bool)
    anchors[0, 10 : 10 + ANCHORS] = True
    return {
        "aux": torch.randn(1, TOKENS, 2 * HIDDEN).bfloat16(),
        "last": torch.randn(1, TOKENS, HIDDEN).bfloat16(),
        "input_ids": torch.randint(2, VOCAB, (1, TOKENS)),
        "document_ids": torch.zeros(1, TOKENS, dtype=torch.long),
        "position_ids": torch.arange(TOKENS)[None],
        "anchors": anchors,
        "loss_mask": torch.ones(1, TOKENS, dtype=torch.bool),
    }


def trained_step(model: nn.Module, settings: dict) -> None:
    whole = dflash.WithTargets(model, Head(), settings).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = whole(batch())
    loss.backward()


ROW = drafter_cost.Row(TOKENS, ANCHORS)


def test_a_block_drafter_is_counted_as_the_module_that_is_trained(drafter):
    model, found, _ = drafter
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    frozen = [p.numel() for p in model.parameters() if not p.requires_grad]
    assert (found.trained, found.frozen) == (sum(trained), sum(frozen))
    assert found.head == model.lm_head.weight.numel()
    assert found.fc == model.fc.weight.numel()
    assert found.body == found.trained - found.fc
    layers = [layer.self_attn for layer in model.layers]
    keys = sum(m.weight.numel() for layer in layers for m in (layer.k_proj, layer.v_proj))
    assert found.keys == keys


@pytest.mark.parametrize("draft_vocab_size", [200, None])
def test_the_stage_builds_what_is_planned(config, prepared_target, settings, draft_vocab_size):
    manifest = read_manifest(prepared_target / "manifest.json")
    kept = draft_vocab_size or manifest["vocab_size"]
    model = dflash.empty(dflash.config_of(settings, manifest, "cpu", kept))
    target, _ = target_config({"path": config["target"]["path"], "package": None})
    settings["draft_vocab_size"] = draft_vocab_size
    found = drafter_size(settings, [0, 2], target, target_size(target, "bfloat16"))
    assert found == counted(model)


def test_operations_of_a_training_step_are_those_that_torch_counts(drafter, settings):
    model, found, _ = drafter
    counter = FlopCounterMode(display=False)
    with counter:
        trained_step(model, settings)
    by_kind = counter.get_flop_counts()["Global"]
    weights = by_kind[torch.ops.aten.mm]  # attention, which is not estimated, is of other kinds
    assert drafter_cost.training_operations(settings, found, ROW) == pytest.approx(
        weights, rel=0.02
    )


def test_operations_of_acceptance_are_those_that_torch_counts(drafter, settings):
    model, found, _ = drafter
    model = model.bfloat16().eval()
    sample = {"input_ids": torch.randint(2, VOCAB, (TOKENS,))}
    sample["aux"] = torch.randn(TOKENS, 2 * HIDDEN).bfloat16()
    counter = FlopCounterMode(display=False)
    with counter:
        dflash.drafts(model, sample, BLOCK - 1, start=20)
    weights = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    source = TokenEstimate(1, 1, 1, TOKENS, 20, "measured", False)
    planned_ = drafter_cost.acceptance_operations(settings, found, {"judge": source}, {"judge"})
    # the context is read for whole groups of 64 anchors: 2 of them here, where 100 anchors are 1.6
    assert planned_ == pytest.approx(weights, rel=0.02)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside it hold at a time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = WeakIdKeyDictionary(ref_type=weakref.ref)

    def free(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(made) if isinstance(t, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage not in self.known:
                self.known[storage] = True
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.free, storage.nbytes())
        return made


@pytest.mark.parametrize("loss", ["ce", "kl_div", "tv", "jsd"])
def test_memory_of_a_training_step_is_what_its_tensors_hold(drafter, settings, loss):
    model, found, size = drafter
    settings["training"]["loss"] = loss
    peak = Peak()
    with peak:
        trained_step(model, settings)
    whole = drafter_cost.training_bytes(settings, found, ROW, size)
    # weights, moments and the target's head stand beside a step
    beside = found.trained * 20 + found.frozen * 4 + VOCAB * HIDDEN * 2
    assert whole - beside == pytest.approx(peak.most, rel=0.25)


def test_blocks_of_a_row_are_bounded_by_anchors_and_by_the_answers():
    training = {"tokens_per_batch": 3000, "anchors": 512}
    settings = {"training": training}
    learn = {"learn": TokenEstimate(10, 1, 10, 15000, 12000, "assumed", True)}
    assert drafter_cost.row_of(settings, learn, {"learn"}).blocks == 2 * 300
    assert drafter_cost.row_of(settings, learn, set()).blocks == 2 * 512, "given answers"
    training["anchors"] = 100
    assert drafter_cost.row_of(settings, learn, {"learn"}).blocks == 2 * 100
    long = {"learn": TokenEstimate(10, 1, 10, 90000, 10000, "assumed", True)}
    assert drafter_cost.row_of(settings, long, {"learn"}).blocks == 100, "a long one is cut"
    del training["anchors"]
    assert drafter_cost.row_of(settings, learn, set()) == drafter_cost.Row(3000, 0)


def test_a_plan_counts_both_algorithms_and_says_the_blocks_of_a_row(config):
    alone = planned(config)
    both = planned(with_block_drafter(config))
    block = both["drafters"]["block"]
    assert block["trained"] > both["drafters"]["small"]["trained"] / 2
    assert both["operations"]["training"] > alone["operations"]["training"]
    assert both["operations"]["acceptance"] > alone["operations"]["acceptance"]
    assert both["memory"]["training"]["small"] == alone["memory"]["training"]["small"]
    assert list(both["memory"]["blocks of a row"]) == ["block"]
    assert "blocks in a packed row" in text_of(both)


@pytest.fixture
def evaluated(config, prepared_target, tmp_path):
    """A configuration that only evaluates a DFlash drafter of others."""
    manifest = read_manifest(prepared_target / "manifest.json")
    folder = dflash_checkpoint(manifest).write(tmp_path / "foreign")
    config["sources"] = {"judge": config["sources"]["judge"]}
    config["drafters"] = {
        "other": {
            "algorithm": "dflash",
            "capture": "low",
            "path": str(folder),
            "layers": {"output_of": LAYERS},
        }
    }
    return config


def test_a_drafter_of_others_is_counted_from_its_configuration_alone(evaluated):
    found = planned(evaluated)
    about = found["drafters"]["other"]
    assert about["trained"] > 0
    assert found["memory"]["training"] == {}
    assert found["operations"]["training"] == 0
    assert found["operations"]["acceptance"] > 0
    assert list(found["sources"]) == ["judge"]


def test_both_formats_are_counted_as_the_imported_model(evaluated, prepared_target, tiny_target):
    settings = evaluated["drafters"]["other"]
    folder = Path(settings["path"])
    output = Target(prepared_target).imported("dflash", folder)
    model = dflash.load(output, "cpu")
    target, _ = target_config({"path": str(tiny_target), "package": None})
    size = target_size(target, "bfloat16")
    for place in (folder, output):
        assert foreign_size(settings | {"path": str(place)}, size) == counted(model)


def test_the_size_of_a_drafter_on_the_hub_is_not_known(evaluated):
    other = evaluated["drafters"]["other"]
    other |= {"path": None, "hub": "a/b", "revision": "0" * 40, "draft_tokens": 3}
    found = planned(evaluated)
    assert found["drafters"]["other"] is None
    text = text_of(found)
    assert "not known here" in text
    assert "acceptance without the drafters whose size" in text
    json.dumps(found)


def test_a_capture_of_evaluated_drafters_costs_no_training_states(config, evaluated, changed):
    trained = dict(config)
    trained["sources"] = {
        "learn": hub_source(role="train"),
        "choose": hub_source(role="validation"),
        **config["sources"],
    }
    trained["hidden_states"] = {"captures": {"low": {"output_of": [0, 2, 3]}}}
    one = trained | {"drafters": {"small": {"algorithm": "eagle3", "capture": "low"}}}
    other = config["drafters"]["other"] | {"capture": "wide"}
    both = changed(one, "hidden_states.captures.wide", {"output_of": [0, 1, 2, 3]})
    both["drafters"]["other"] = other
    few, more = planned(one), planned(both)
    assert set(more["sources"]["learn"]["states"]) == {"low"}
    assert set(more["sources"]["judge"]["states"]) == {"low", "wide"}
    extra = more["operations"]["extraction"] - few["operations"]["extraction"]
    assert 0 < extra < 0.05 * few["operations"]["extraction"]
    text_of(more)
