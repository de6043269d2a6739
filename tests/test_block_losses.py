"""The losses of DFlash2 and DSpark against speculators' own and an fp64 reference; their targets and places."""

import math

import pytest
import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash2.metrics import compute_metrics as dflash2_metrics
from speculators.models.dflash2.metrics import selector_training_candidates
from speculators.models.dspark.metrics import compute_metrics as dspark_metrics
from transformers import LlamaForCausalLM

from block_models import BLOCK, Model, each_case, markov
from draftmill.drafter_trials import zeroed
from draftmill.packing import pack


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
            total += float(loss.detach()) * math.exp(-slot / gamma) / scored
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
    assert float(loss.detach()) == pytest.approx(float(theirs[0].detach()), rel=1e-5)
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


@pytest.mark.parametrize(("case", "further"), [("dflash2", 8), ("dspark", 2)])
def test_without_heads_the_loss_is_that_of_guessing(model_of, case, further):
    """Equal logits, equal scores of the 8 candidates, a confidence of one half."""
    model = model_of(case)
    batch = model.batch(model.samples, 384)
    with zeroed(model.algorithm.heads(model.drafter)), torch.no_grad():
        loss, _ = model.model(batch)
        found = model.model.predict(batch)
    assert not found.logits.any()
    own = found.targets.double().log_softmax(-1)
    drafts = math.log(own.shape[1]) + (own.exp() * own).sum(-1)
    expected = (found.weights * (drafts + math.log(further))).sum()
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)
