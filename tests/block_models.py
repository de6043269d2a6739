"""Drafters of every block algorithm beyond DFlash, over one extraction in float32; a loop that drafts single blocks."""

import copy
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from draftmill import algorithms, block_drafter, draft_vocab, dtype_policy, target_head
from draftmill.packing import pack
from draftmill.state_dataset import StateDataset
from draftmill.target_manifest import read_manifest
from mini_road import MiniRoad, write_data
from workflow import of_algorithm, rows, tiny_config, with_block_drafter

LAYERS = [0, 2]
BLOCK = 4
CASES = {
    "dflash2": of_algorithm("dflash2"),
    "dspark": of_algorithm("dspark"),
    "dspark, gated": of_algorithm("dspark", markov_head_type="gated"),
    "dspark, rnn": of_algorithm("dspark", markov_head_type="rnn"),
    "dspark, own features": of_algorithm("dspark", confidence_head_with_markov=False),
    "dspark, no confidence": of_algorithm("dspark", enable_confidence_head=False),
}
each_case = pytest.mark.parametrize("case", CASES)


def extracted(target: Path, dtype: str) -> dict:
    """The configuration of a finished extraction in the current folder."""
    write_data(rows(6), rows(3, 500), rows(3, 600))
    config = tiny_config(target)
    config["target"]["dtype"] = dtype
    road = MiniRoad(config)
    road.prepare_target()
    for source in ("learn", "choose", "judge"):
        road.to_states(source)
    return config


def road_of(states: dict, case: str, **training) -> MiniRoad:
    config = with_block_drafter(copy.deepcopy(states), **CASES[case])
    config["drafters"]["block"]["training"] |= training
    road = MiniRoad(config)
    road.build_draft_vocab("block")
    return road


class Model:
    """A drafter of a case with weights that are far from their start, and its training samples."""

    def __init__(self, states: dict, case: str, **training):
        self.road = road_of(states, case, **training)
        self.name = CASES[case]["algorithm"]
        self.algorithm = algorithms.load(self.name)
        self.manifest = read_manifest(self.road.target)
        stage = self.road.stage(f"train_{self.name}", drafter="block")
        self.settings = stage.config
        path = self.road.root / "draft_vocab/block.safetensors"
        self.t2d, self.d2t, _ = draft_vocab.read(path)
        tensors = target_head.read(self.road.head, stage)
        config = self.algorithm.config_of(self.settings, self.manifest, "cpu", len(self.d2t))
        torch.manual_seed(0)
        made = (config, tensors, self.t2d, self.d2t, dtype_policy.DTYPES["float32"])
        self.drafter = self.algorithm.new_drafter(*made)
        spread(self.drafter)
        rows = self.t2d if self.drafter.use_draft_vocab else None
        head = target_head.TargetHead(self.manifest, tensors, rows)
        self.model = self.algorithm.WithTargets(self.drafter, head, self.settings)
        data = StateDataset([self.road.states("learn", "manifest.json")], "float32", LAYERS)
        self.samples = [data[i] for i in range(3)]

    def batch(self, samples: list[dict], limit: int = 256) -> dict:
        prepare = self.algorithm.prepared(self.settings)
        return pack([prepare(s, str(i)) for i, s in enumerate(samples)], limit)


def spread(drafter: torch.nn.Module) -> None:
    """Weights under which convolutions, selector and Markov head matter."""
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.startswith(("candidate_selector.", "markov_head.", "confidence_head.")):
                parameter.copy_(torch.randn_like(parameter) * 0.5)
            elif "conv." in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def loop(model: Model, sample: dict, steps: int, anchor: int) -> list[int]:
    """One block, drafted as an engine does: nothing of the text after the anchor is at hand."""
    drafter, first = model.drafter, model.algorithm.FIRST
    ids, aux = sample["input_ids"][: anchor + 1], sample["aux"][: anchor + 1]
    places = torch.arange(anchor + 1)
    block = steps + first
    if model.name == "dflash2":
        for layer in drafter.layers:
            layer.attention_conv.block_size = layer.mlp_conv.block_size = block
    states = block_drafter.states(
        drafter, aux, ids, torch.zeros_like(places), places, torch.tensor([anchor]), block
    )[0, first:]
    logits, known = drafter.lm_head(states), [int(ids[anchor])]
    for slot in range(steps):
        if model.name == "dflash2":
            known.append(selected(drafter.candidate_selector, logits[slot], states[slot], known))
        else:
            found = (logits[slot] + markov(drafter.markov_head, states, known)).argmax()
            known.append(int(found + drafter.d2t[found]))
    return known[1:]


def selected(selector, logits, state, known: list[int]) -> int:
    """z-lab's CandidateSelector.select at temperature 0, for one slot."""
    unary, candidates = torch.topk(logits, selector.top_k, sorted=False)
    before = selector.predecessor_codebook[known[-1]] * selector.hidden_projection(state)
    scores = unary + torch.einsum("r,kr->k", before, selector.successor_codebook[candidates])
    return int(candidates[scores.argmax()])


def markov(head, states, known: list[int]) -> torch.Tensor:
    """The Markov head's logits for the slot after `known`, written out."""
    embedded = head.markov_w1.weight[known]
    last, state = embedded[-1], torch.zeros(head.markov_rank)
    if head.head_type == "gated":
        both = torch.cat([states[len(known) - 1], last])
        last = torch.sigmoid(functional.linear(both, head.gate_proj.weight, head.gate_proj.bias))
        last = last * embedded[-1]
    elif head.head_type == "rnn":
        for before, hidden in zip(embedded, states, strict=False):
            parts = head.joint_proj(torch.cat([state, before, hidden]))
            gate, candidate, last = parts.chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        last = last.tanh()
    return head.markov_w2.weight @ last
