"""DFlash's measured steps are those of real generation loops: z-lab's own, and one that keeps no cache."""

from collections.abc import Callable
from contextlib import chdir
from functools import cache, partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import families
import reference_block_loop
import zlab
from block_drafters import LIMIT, PROMPTS, answers, float32_road, measured
from draftmill.atomic import read_json
from tiny_target import make_target_that_stops

DRAFTERS = {
    "narrow": {"layers": {"output_of": [0, 2]}},
    "wide": {"block_size": 8, "draft_vocab_size": 512, "num_layers": 1},
}
Found = tuple[list[int], list[int]]  # an answer, and the tokens emitted in each step


class Made:
    """A road in float32 with its drafters, and the target as transformers loads it."""

    def __init__(self, folder: Path, make_target: Callable[[Path], Path], drafters: dict):
        folder.mkdir()
        self.folder = folder
        checkpoint = make_target(folder / "target")
        with chdir(folder):
            self.road = float32_road(checkpoint, drafters)
            manifest = read_json(self.road.target)
            self.answers = answers(self.road)
        nested = manifest["architectures"][0].endswith("ForConditionalGeneration")
        kind = AutoModelForImageTextToText if nested else AutoModelForCausalLM
        self.target = kind.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.stop, self.layers = manifest["stop_ids"], manifest["layers"]

    def drafter(self, name: str) -> Path:
        return self.folder / self.road.root / "drafters" / name

    def measured(self, name: str, block: int) -> list[Found]:
        """As measure_acceptance has them."""
        texts = [a["response_ids"] for a in self.answers]
        with chdir(self.folder):
            return list(zip(texts, measured(self.road, name, block - 1), strict=True))

    def by_zlab(self, name: str, block: int) -> list[Found]:
        model = zlab.drafter_in(self.drafter(name), self.layers)
        model.check_target(self.target)
        prompts = [a["prompt_ids"] for a in self.answers]
        return [zlab.generated(model, self.target, p, LIMIT, self.stop, block) for p in prompts]

    def without_cache(self, name: str, block: int) -> list[Found]:
        model = reference_block_loop.BlockDrafter(self.drafter(name))
        loop, stop = reference_block_loop.speculate, set(self.stop)
        prompts = [a["prompt_ids"] for a in self.answers]
        return [loop(self.target, model, p, LIMIT, stop, block - 1) for p in prompts]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Made:
    """A target with attention alone: its answers end by themselves in places, or are cut."""
    return Made(tmp_path_factory.mktemp("plain") / "run", make_target_that_stops, DRAFTERS)


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Callable[[str], Made]:
    """name of a tiny family -> its target with a drafter, trained shortly, or every draft would be right."""

    @cache
    def made(name: str) -> Made:
        folder = tmp_path_factory.mktemp(name) / "run"
        drafter = {"training": {"steps": 60, "validate_every": 60}}
        return Made(folder, partial(families.make, name), {"block": drafter})

    return made


def test_some_answers_end_by_themselves_near_the_limit_and_some_are_cut(plain):
    texts = [a["response_ids"] for a in plain.answers]
    ended = {len(text) for text in texts if text[-1] in plain.stop}
    assert any(LIMIT - 4 < length < LIMIT for length in ended)
    assert any(length <= LIMIT - 8 for length in ended)
    assert any(len(text) == LIMIT and text[-1] not in plain.stop for text in texts)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_accepted_length_occurs(plain, drafter):
    block = plain.road.plan.config["drafters"][drafter]["block_size"]
    steps = [steps for _, steps in plain.measured(drafter, block)]
    assert set(chain(*steps)) == set(range(1, block + 1))


@pytest.mark.parametrize("block", [2, 4, 7, 8, 12])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_step_is_that_of_zlabs_own_loop(plain, zlab_package, drafter, block):
    assert plain.measured(drafter, block) == plain.by_zlab(drafter, block)


@pytest.mark.parametrize("block", [4, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_step_is_that_of_a_loop_without_any_cache(plain, drafter, block):
    assert plain.measured(drafter, block) == plain.without_cache(drafter, block)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3", "gpt_oss", "gemma3"])
def test_on_other_families_every_step_is_that_of_a_loop_without_any_cache(name, other):
    made = other(name)
    found = made.measured("block", 4)
    assert len(found) == PROMPTS
    assert found == made.without_cache("block", 4)
    assert {1, 2, 3, 4} == set(chain(*(steps for _, steps in found)))


def test_zlabs_loop_leaves_the_text_of_a_target_with_recurrent_state(
    other, zlab_package, record_property
):
    """Its cache cannot take back rejected drafts there, so its tau would be that of another text."""
    made = other("qwen3_5")
    found, theirs = made.measured("block", 4), made.by_zlab("block", 4)
    same = sum(text == other for (text, _), (other, _) in zip(found, theirs, strict=True))
    record_property("answers that z-lab's loop left as they are", same)
    assert same < PROMPTS
