"""DFlash2 and DSpark: losses against speculators' own and fp64 references, drafts against a loop of single blocks."""

import copy
import json
import math

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.dflash2.metrics import compute_metrics as dflash2_metrics
from speculators.models.dflash2.metrics import selector_training_candidates
from speculators.models.dspark.metrics import compute_metrics as dspark_metrics
from torch.nn import functional
from transformers import LlamaForCausalLM

from draftmill import algorithms, block_drafter, draft_vocab, dtype_policy, target_head
from draftmill.errors import DraftmillError
from draftmill.packing import pack
from draftmill.state_dataset import StateDataset
from draftmill.target_manifest import read_manifest
from mini_road import MiniRoad
from workflow import of_algorithm, with_block_drafter

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


@pytest.fixture(scope="module")
def states(tiny_target, tmp_path_factory):
    """A finished extraction in float32; the tests plan other drafters over it."""
    import os
    from pathlib import Path

    from mini_road import write_data
    from workflow import rows, tiny_config

    folder, before = tmp_path_factory.mktemp("blocks"), Path.cwd()
    os.chdir(folder)
    write_data(rows(6), rows(3, 500), rows(3, 600))
    config = tiny_config(tiny_target)
    config["target"]["dtype"] = "float32"
    road = MiniRoad(config)
    road.prepare_target()
    for source in ("learn", "choose", "judge"):
        road.to_states(source)
    yield config
    os.chdir(before)


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


@pytest.fixture
def model_of(states):
    return lambda case, **training: Model(states, case, **training)


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


@each_case
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_drafts_are_those_of_a_loop_over_single_blocks(model_of, case, steps):
    model = model_of(case)
    sample = model.samples[1]
    with torch.inference_mode():
        found = model.algorithm.drafts(model.drafter, sample, steps, 3)
        for anchor in range(3, len(sample["input_ids"])):
            assert found[anchor - 1].tolist() == loop(model, sample, steps, anchor)
        assert (found[:2] == -1).all()


@each_case
def test_blocks_before_a_length_limit_are_shorter(model_of, case):
    model = model_of(case)
    sample = model.samples[1]
    end = len(sample["input_ids"])
    with torch.inference_mode():
        found = model.algorithm.drafts(model.drafter, sample, 3, 3, end)
        for anchor in (end - 4, end - 3, end - 2):
            steps = min(3, end - 1 - anchor)
            expected = loop(model, sample, steps, anchor) + [-1] * (3 - steps)
            assert found[anchor - 1].tolist() == expected


@each_case
def test_drafts_follow_the_drafters_own_choices_and_not_the_text(model_of, case):
    """The choice in a slot depends on the one before, and the text after the anchor changes nothing."""
    model = model_of(case)
    sample = dict(model.samples[1])
    found = model.algorithm.drafts(model.drafter, sample, 3)
    teacher = model.model.predict(model.batch([sample])).logits.argmax(-1)
    ids = sample["input_ids"].clone()
    ids[12:] = ids[12:].flip(0)
    changed = model.algorithm.drafts(model.drafter, sample | {"input_ids": ids}, 3)
    assert torch.equal(found[:11], changed[:11])
    assert not torch.equal(found[11:], changed[11:])
    assert len(set(teacher.tolist())) > 3


@each_case
def test_every_prediction_is_of_its_place_and_scored_where_the_text_is_an_answer(model_of, case):
    model = model_of(case)
    batch = model.batch(model.samples, 384)
    found = model.model.predict(batch)
    first = model.algorithm.FIRST
    count = BLOCK - first
    anchors = batch["anchors"][0].nonzero().flatten()
    assert torch.equal(found.anchor.view(-1, count), anchors[:, None].expand(-1, count))
    assert torch.equal(
        found.position - found.anchor, torch.arange(1, count + 1).repeat(len(anchors))
    )
    mask, documents = batch["loss_mask"][0], batch["document_ids"][0]
    for index in range(len(found.position)):
        span = range(int(found.anchor[index]) + 1, int(found.position[index]) + 1)
        answered = all(
            p < len(mask) and mask[p] and documents[p] == documents[found.anchor[index]]
            for p in span
        )
        assert bool(found.weights[index] > 0) == answered
    assert 0 < (found.weights > 0).sum() < len(found.weights)


@each_case
def test_targets_are_the_targets_own_logits_for_the_drafted_token(model_of, case):
    model = model_of(case)
    batch = model.batch(model.samples[:1])
    found = model.model.predict(batch)
    target = LlamaForCausalLM.from_pretrained(model.manifest["checkpoint"], dtype=torch.float32)
    with torch.no_grad():
        own = target(model.samples[0]["input_ids"][None]).logits[0]
    if model.drafter.use_draft_vocab:
        own = own[:, model.t2d]
    scored = found.weights > 0
    expected = own[found.position[scored] - 1]
    torch.testing.assert_close(found.targets[scored], expected, rtol=1e-4, atol=1e-4)


def reference(model: Model, batch: dict) -> float:
    """The whole loss in fp64, block by block and draft by draft, KL divergence and exponential weights."""
    blocks, alpha = model.model.blocks(batch), model.settings["training"]
    gamma = alpha["gamma"] or BLOCK * 7 / 16
    drafter, total = model.drafter.double(), 0.0
    scored = int(blocks.scored.sum())
    for states, known, targets, counts in zip(
        blocks.states, blocks.known, blocks.targets, blocks.scored, strict=True
    ):
        states, targets = states.double(), targets.double()
        for slot in range(len(counts)):
            if not counts[slot]:
                continue
            logits = drafter.lm_head(states[slot])
            if model.name == "dspark":
                logits = logits + markov(drafter.markov_head, states, known[: slot + 1].tolist())
            goal, own = targets[slot].log_softmax(-1), logits.log_softmax(-1)
            loss = (goal.exp() * (goal - own)).sum()
            if model.name == "dflash2":
                extra = selector_loss(
                    drafter.candidate_selector, logits, states[slot], known[slot], goal
                )
                loss = loss + alpha["selector_loss_alpha"] * extra
            elif drafter.confidence_head is not None:
                features = states[slot]
                if drafter.config.confidence_head_with_markov:
                    embedded = drafter.markov_head.markov_w1.weight[known[slot]]
                    features = torch.cat([features, embedded])
                p = drafter.confidence_head.proj(features)[0].sigmoid()
                q = torch.minimum(own.exp(), goal.exp()).sum().detach()
                extra = -(q * p.log() + (1 - q) * (1 - p).log())
                loss = loss + alpha["confidence_head_alpha"] * extra
            total += float(loss) * math.exp(-slot / gamma) / scored
    drafter.float()
    return total


def selector_loss(selector, logits, state, known, goal) -> torch.Tensor:
    candidates = logits.topk(selector.top_k).indices
    best = goal.argmax()
    if best not in candidates:
        candidates = torch.cat([candidates[:-1], best[None]])
    context = selector.predecessor_codebook[known] * (selector.hidden_projection.weight @ state)
    scores = logits[candidates] + selector.successor_codebook[candidates] @ context
    return -scores.log_softmax(-1)[candidates == best].sum()


@each_case
@pytest.mark.parametrize("count", [1, 3])
def test_the_loss_is_that_of_the_fp64_reference(model_of, case, count):
    weights = {"selector_loss_alpha": 0.7} if case == "dflash2" else {"confidence_head_alpha": 0.7}
    model = model_of(case, **weights)
    # markov() starts from zeros of the default dtype
    batch = model.batch(model.samples[:count], 384)
    loss, _ = model.model(batch)
    torch.set_default_dtype(torch.float64)
    try:
        expected = reference(model, batch)
    finally:
        torch.set_default_dtype(torch.float32)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("weights", ["exponential", "dpace"])
@pytest.mark.parametrize("case", ["dflash2", "dspark", "dspark, no confidence"])
def test_the_loss_is_speculators_own(model_of, case, weights):
    model = model_of(case, position_weights=weights, loss="ce")
    batch = model.batch(model.samples, 384)
    loss, metrics = model.model(batch)
    blocks = model.model.blocks(batch)
    logits = model.model.logits(blocks).flatten(0, 1)[None]
    targets, scored = blocks.targets.flatten(0, 1)[None], blocks.scored.reshape(1, -1)
    options = {
        "loss_config": resolve_loss_config("ce", "eager"),
        "tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0],
        "gamma": BLOCK * 7 / 16,
        "per_position_loss_weight": "dpace" if weights == "dpace" else "fixed-exp-decay",
        "sample_from_anchor": True,
    }
    if case == "dflash2":
        selector = model.drafter.candidate_selector
        candidates = logits.topk(selector.top_k).indices
        candidates, place, present = selector_training_candidates(candidates, targets.argmax(-1))
        states, known = blocks.states.flatten(0, 1)[None], blocks.known.view(1, -1)
        scores = selector.score_candidates(logits, states, known, candidates)
        extra = (candidates, scores, place, present)
        theirs = dflash2_metrics(
            logits, targets, *extra, scored, model.model.count, selector.top_k, **options
        )
    else:
        confidence = None
        if model.drafter.confidence_head is not None:
            before = model.drafter.markov_head.prev_embeddings(blocks.known)
            features = torch.cat([blocks.states, before], dim=-1)
            confidence = model.drafter.confidence_head(features).view(1, -1)
        extra = (confidence, scored, model.model.count)
        theirs = dspark_metrics(logits, targets, *extra, **options)
    assert float(loss) == pytest.approx(float(theirs[0]), rel=1e-5)
    assert int(metrics["scored"]) == int(scored.sum())


@each_case
def test_a_conversation_has_the_same_loss_beside_others_and_alone(model_of, case):
    model = model_of(case)
    alone, _ = model.model(model.batch(model.samples[:1]))
    prepare = model.algorithm.prepared(model.settings)
    first = prepare(model.samples[0], "0")
    others = [prepare(s, "1") for s in model.samples[1:]]
    silent = [o | {"anchors": torch.zeros_like(o["anchors"])} for o in others]
    together, _ = model.model(pack([*silent, first], 384))
    assert float(together) == pytest.approx(float(alone), rel=1e-4)


@each_case
def test_training_lowers_the_loss_and_its_export_reads_back_strictly(states, case):
    road = road_of(states, case, steps=40, learning_rate=0.01, validate_every=20)
    folder = road.train("block")
    rows = pq.read_table(folder / "metrics.parquet").to_pylist()
    losses = [r["loss"] for r in rows if r["kind"] == "train"]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    algorithm = algorithms.load(CASES[case]["algorithm"])
    model = algorithm.load(folder, "cpu")
    algorithm.check_target(model, read_manifest(road.target), LAYERS, folder)
    written = load_file(folder / "model.safetensors")
    assert set(written) == set(model.state_dict())
    assert all(torch.equal(written[k], v) for k, v in model.state_dict().items())
    head = load_file(road.head)
    assert torch.equal(written["embed_tokens.weight"], head["embed_tokens.weight"])
    count = BLOCK - algorithm.FIRST
    proposed = json.loads((folder / "config.json").read_text())["speculators_config"]
    assert proposed["proposal_methods"][0]["speculative_tokens"] == count
    found = json.loads(road.measure_acceptance("judge", "block").read_text())
    assert found["conditions"]["draft_tokens"] == count
    assert 1 <= found["tau_pooled"] <= count + 1


@pytest.mark.parametrize("part", ["candidate_selector", "layers.0.mlp_conv"])
def test_every_part_of_dflash2_is_trained(model_of, part):
    assert trained(model_of("dflash2"), part)


@pytest.mark.parametrize("part", ["markov_head", "confidence_head"])
def test_every_head_of_dspark_is_trained(model_of, part):
    assert trained(model_of("dspark"), part)


def trained(model: Model, part: str) -> bool:
    """Whether every parameter of a part gets a gradient."""
    loss, _ = model.model(model.batch(model.samples, 384))
    loss.backward()
    parts = [p for n, p in model.drafter.named_parameters() if n.startswith(part)]
    return bool(parts) and all(p.grad is not None and p.grad.abs().sum() > 0 for p in parts)


@pytest.mark.parametrize("weights", [False, True])
def test_dflash2_counts_as_right_what_its_selector_would_choose(model_of, weights):
    """With a selector that has no say, its choice is the slot's own; else another one."""
    model = model_of("dflash2")
    if not weights:
        with torch.no_grad():
            model.drafter.candidate_selector.successor_codebook.zero_()
    blocks = model.model.blocks(model.batch(model.samples, 384))
    found = model.model.predictions(blocks)
    same = torch.equal(model.model.chosen(blocks, found), found.logits.argmax(-1))
    assert same != weights


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"conv_group_size": 24}, "conv_group_size is 24, but must divide the hidden size .* 64"),
        ({"selector_top_k": 1000}, "selector_top_k is 1000, but the target .* knows 512 tokens"),
    ],
)
def test_sizes_that_do_not_suit_the_target_are_refused(states, change, sentence):
    config = with_block_drafter(copy.deepcopy(states), **CASES["dflash2"] | change)
    road = MiniRoad(config)
    road.build_draft_vocab("block")
    with pytest.raises(DraftmillError, match=sentence):
        road.train("block")
