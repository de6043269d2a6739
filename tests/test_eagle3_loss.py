"""EAGLE-3's training loss against an independent fp64 reference: targets, shift, masks, packs, padding."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from draftmill import eagle3, target_head
from draftmill.dtype_policy import DTYPES
from draftmill.packing import pack
from draftmill.state_dataset import StateDataset
from mini_road import MiniRoad

STEPS = 3


@pytest.fixture
def exact(config):
    config["target"]["dtype"] = "float32"
    road = MiniRoad(config)
    road.prepare_target()
    for source in ("learn", "choose"):
        road.to_states(source)
    road.build_draft_vocab()
    return road


@pytest.fixture
def model(exact):
    torch.manual_seed(0)
    from draftmill import draft_vocab
    from draftmill.target_manifest import read_manifest

    manifest = read_manifest(exact.target)
    stage = exact.stage("train_eagle3", drafter="small")
    t2d, d2t, _ = draft_vocab.read(exact.root / "draft_vocab/small.safetensors")
    tensors = target_head.read(exact.head, stage)
    config = eagle3.config_of(stage.config, manifest, "cpu", len(d2t))
    drafter = eagle3.new_drafter(config, tensors, t2d, d2t, DTYPES["float32"])
    head = target_head.TargetHead(manifest, tensors, t2d)
    return eagle3.WithTargets(drafter, head, stage.config), t2d


@pytest.fixture
def samples(exact) -> list[dict]:
    data = StateDataset([exact.states("learn", "manifest.json")], "float32", [0, 2, 3])
    return [data[i] for i in range(3)]


def reference(exact, model, t2d, samples: list[dict], logits: list[torch.Tensor]) -> float:
    """The sum over TTT steps of the mean KL divergence, from the target's own logits, in fp64.

    At step k, row j of a sample (token j + 1 known, features up to token j) drafts token j + 2 + k; the
    target's distribution for that token is the one after token j + 1 + k, which the loss mask must hold.
    """
    manifest = json.loads(exact.target.read_text())
    target = LlamaForCausalLM.from_pretrained(manifest["checkpoint"], dtype=torch.float32).eval()
    total = 0.0
    for k in range(STEPS):
        losses, first = [], 0
        for sample in samples:
            ids, mask = sample["input_ids"], sample["loss_mask"]
            with torch.no_grad():
                own = target(ids[None]).logits[0][:, t2d].double().log_softmax(-1)
            for j in range(len(ids) - 1 - k):
                answered = mask[j + 1 + k] and j + k >= STEPS - 1
                if answered:
                    drafted = logits[k][0, first + j].double().log_softmax(-1)
                    goal = own[j + 1 + k]
                    losses.append((goal.exp() * (goal - drafted)).sum())
            first += len(ids) - 1
        total += float(torch.stack(losses).mean())
    return total


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("limit", [256, 384])
def test_the_loss_is_that_of_the_reference_packed_and_padded(exact, model, samples, count, limit):
    with_targets, t2d = model
    logits: list[torch.Tensor] = []
    with_targets.drafter.lm_head.register_forward_hook(
        lambda m, a, out: logits.append(out.detach())
    )
    batch = pack([eagle3.shifted(s, STEPS) for s in samples[:count]], limit)
    loss, _ = with_targets(batch)
    expected = reference(exact, model, t2d, samples[:count], logits)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_a_sample_has_the_same_logits_alone_and_in_a_pack(model, samples):
    with_targets, _ = model
    drafter = with_targets.drafter

    def logits(chosen: list[dict]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        hook = drafter.lm_head.register_forward_hook(lambda m, a, out: found.append(out.detach()))
        with_targets(pack([eagle3.shifted(s, STEPS) for s in chosen], 384))
        hook.remove()
        return found

    alone, together = logits(samples[1:2]), logits(samples)
    first, size = len(samples[0]["input_ids"]) - 1, len(samples[1]["input_ids"]) - 1
    for k in range(STEPS):
        rows = size - k  # later rows are fed tokens of the next sample, and carry no loss
        torch.testing.assert_close(
            alone[k][0, :rows], together[k][0, first : first + rows], rtol=1e-4, atol=1e-5
        )
