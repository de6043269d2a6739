"""DFlash's forward and loss: speculators' own on the same anchors, and an independent fp64 reference."""

import math
from collections.abc import Callable
from contextlib import chdir
from functools import partial
from pathlib import Path

import pytest
import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import core
from speculators.models.dflash.metrics import compute_metrics
from transformers import LlamaForCausalLM

from draftmill import dflash, draft_vocab, target_head
from draftmill.packing import pack
from draftmill.state_dataset import StateDataset
from draftmill.target_manifest import read_manifest
from mini_road import MiniRoad, write_data
from workflow import rows, tiny_config, with_block_drafter

LOSSES = ["kl_div", "rkl", "jsd", "ce", "tv"]
ALIKE = [*((loss, "exponential") for loss in LOSSES), ("ce", "dpace")]


class Made:
    """A new DFlash drafter for the tiny target in float32, the target, and samples of its states."""

    def __init__(self, folder: Path, checkpoint: Path):
        with chdir(folder):
            write_data(rows(6), rows(3, 500), rows(3, 600))
            config = with_block_drafter(tiny_config(checkpoint))
            config["target"]["dtype"] = "float32"
            road = MiniRoad(config)
            road.prepare_target()
            road.to_states("learn")
            self.stage = road.stage("train_dflash", drafter="block")
            t2d, self.d2t, _ = draft_vocab.read(road.build_draft_vocab("block"))
            self.manifest = read_manifest(road.target)
            self.tensors = target_head.read(road.head, self.stage)
            data = StateDataset([road.states("learn", "manifest.json")], "float32", [0, 2])
            self.samples = [data[i] for i in range(4)]
        self.t2d = t2d
        self.target = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def model(self, block: int = 4, **training) -> dflash.WithTargets:
        settings = self.stage.config | {"block_size": block}
        settings["training"] = settings["training"] | training
        torch.manual_seed(0)
        config = dflash.config_of(settings, self.manifest, "cpu", len(self.d2t))
        drafter = dflash.new_drafter(config, self.tensors, self.t2d, self.d2t, torch.float32)
        head = target_head.TargetHead(self.manifest, self.tensors, self.t2d)
        return dflash.WithTargets(drafter, head, settings)

    def prepared(self, samples: list[dict], count: int) -> list[dict]:
        prepare = dflash.prepared({"training": {"anchors": count}})
        return [prepare(sample, f"0/0/{i}") for i, sample in enumerate(samples)]


@pytest.fixture(scope="module")
def made(tiny_target, tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("loss"), tiny_target)


@pytest.mark.parametrize("block", [4, 8])
@pytest.mark.parametrize(("loss", "weights"), ALIKE)
def test_a_row_of_one_document_is_as_in_speculators(made, monkeypatch, loss, weights, block):
    model = made.model(block, loss=loss, position_weights=weights)
    batch = pack(made.prepared(made.samples[:1], 16), 256)
    anchors = batch["anchors"][0].nonzero().flatten()
    chosen = (anchors, torch.ones_like(anchors, dtype=torch.bool))
    monkeypatch.setattr(core, "select_anchors", lambda *a: chosen)
    _, logits, targets, scored, _ = model.drafter._backbone_forward(
        batch["aux"],
        batch["input_ids"],
        batch["loss_mask"],
        model.head(batch["last"]),  # its norm and head are identities here
        batch["document_ids"],
        batch["position_ids"],
        max_anchors=len(anchors),
    )
    expected, _ = compute_metrics(
        logits,
        targets,
        scored,
        block,
        gamma=model.gamma,
        loss_config=resolve_loss_config(loss, "eager"),
        per_position_loss_weight=weights,
    )
    found = model.predict(batch)

    def drafted(values: torch.Tensor) -> torch.Tensor:
        return values.view(len(anchors), block, -1)[:, 1:].flatten(0, 1)

    counted = found.weights > 0
    assert 0 < counted.sum() < len(counted)
    assert torch.equal(counted, drafted(scored).flatten() > 0)
    torch.testing.assert_close(found.logits, drafted(logits), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.targets[counted], drafted(targets)[counted])
    torch.testing.assert_close(model(batch)[0], expected, rtol=1e-5, atol=0)


def elementwise(loss: str, drafted: torch.Tensor, goal: torch.Tensor) -> float:
    """The loss of one draft from two rows of logits, written out, in float64."""
    q, p = drafted.double().softmax(-1), goal.double().softmax(-1)
    middle = (p + q) / 2
    return {
        "kl_div": (p * (p / q).log()).sum(),
        "rkl": (q * (q / p).log()).sum(),
        "jsd": ((p * (p / middle).log()).sum() + (q * (q / middle).log()).sum()) / 2,
        "ce": -q[goal.argmax()].log(),
        "tv": (p - q).abs().sum() / 2,
    }[loss].item()


def slot_weights(losses: list[float], weights: str, gamma: float) -> list[float]:
    """Of the scored slots of one block, the first first."""
    if weights == "exponential":
        return [math.exp(-k / gamma) for k in range(len(losses))]
    reached = [
        1.0
    ]  # D-PACE: how likely it is that a draft up to here is looked at, half of it smoothing
    for value in losses:
        reached.append(reached[-1] * (0.5 * math.exp(-value) + 0.5))
    return [sum(reached[k + 1 :]) for k in range(len(losses))]


def reference(
    made: Made, loss: str, weights: Callable, samples: list[dict], limit: int, logits: torch.Tensor
) -> float:
    """The loss from the samples as they are stored, the target's own logits, and the drafter's.

    weights: the cross entropies of a block's scored slots -> how each counts.
    logits: [anchors, block - 1, draft vocabulary], the anchors in the order of samples and tokens.
    """
    total, count = 0.0, 0
    rows = iter(logits)
    for sample in samples:
        ids, mask = sample["input_ids"][:limit], sample["loss_mask"][:limit]
        with torch.no_grad():
            own = made.target(ids[None]).logits[0][:, made.t2d]
        for anchor in sample["anchors"][:limit].nonzero().flatten().tolist():
            row, losses, entropies = next(rows), [], []
            for k in range(1, len(row) + 1):
                place = anchor + k
                if place >= len(ids) or not mask[place]:
                    break
                pair = row[k - 1], own[place - 1]
                losses.append(elementwise(loss, *pair))
                entropies.append(elementwise("ce", *pair))
            total += sum(w * v for w, v in zip(weights(entropies), losses, strict=True))
            count += len(losses)
    assert next(rows, None) is None
    return total / count


def two_answers(sample: dict) -> dict:
    """The same sample with some tokens of its answer taken for another prompt."""
    mask = sample["loss_mask"].clone()
    first = int(mask.nonzero()[0])
    mask[first + 9 : first + 13] = False
    return sample | {"loss_mask": mask}


@pytest.mark.parametrize("limit", [40, 256, 384])
@pytest.mark.parametrize("documents", [1, 3])
@pytest.mark.parametrize(("loss", "weights"), [*ALIKE, ("kl_div", "dpace"), ("tv", "dpace")])
def test_the_loss_is_that_of_the_reference(made, loss, weights, documents, limit):
    model = made.model(loss=loss, position_weights=weights)
    samples = made.prepared([two_answers(s) for s in made.samples[:documents]], 12)
    logits: list[torch.Tensor] = []
    model.drafter.lm_head.register_forward_hook(lambda m, a, out: logits.append(out.detach()))
    found, _ = model(pack(samples, limit))
    counts = partial(slot_weights, weights=weights, gamma=model.gamma)
    rows = logits[0].view(-1, model.block - 1, len(made.d2t))
    expected = reference(made, loss, counts, samples, limit, rows)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_a_sample_has_the_same_logits_alone_and_in_a_pack(made):
    model = made.model()
    samples = made.prepared(made.samples[:3], 8)
    alone = [model.predict(pack([sample], 384)).logits for sample in samples]
    together = model.predict(pack(samples, 384)).logits
    torch.testing.assert_close(torch.cat(alone), together, rtol=1e-4, atol=1e-5)


def test_a_row_without_an_answer_has_no_loss_and_no_gradient(made):
    model = made.model()
    sample = made.samples[0] | {"loss_mask": torch.zeros_like(made.samples[0]["loss_mask"])}
    loss, metrics = model(pack(made.prepared([sample], 8), 256))
    loss.backward()
    assert (loss.item(), int(metrics["scored"])) == (0, 0)
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_the_loss_depends_on_no_state_at_or_after_an_anchor(made):
    """The states of one block's anchor and of what follows are replaced: nothing changes."""
    model = made.model()
    (sample,) = made.prepared(made.samples[:1], 1)
    anchor = int(sample["anchors"].nonzero())
    changed = sample["aux"].clone()
    changed[anchor:] = 7.0
    logits = model.predict(pack([sample], 256)).logits
    assert torch.equal(logits, model.predict(pack([sample | {"aux": changed}], 256)).logits)
    changed[anchor - 1] = 7.0
    assert not torch.equal(logits, model.predict(pack([sample | {"aux": changed}], 256)).logits)
