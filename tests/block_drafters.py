"""Roads in float32 with DFlash drafters that are often right on the test prompts, having been trained on them."""

import copy
import json
from pathlib import Path

from draftmill import tables
from mini_road import MiniRoad, write_data
from workflow import rows, tiny_config

PROMPTS = 20
LIMIT = 14  # of an answer: some end by themselves, a few tokens before it
TRAINING = {
    "steps": 160,
    "tokens_per_batch": 512,
    "learning_rate": 4e-3,
    "warmup_steps": 5,
    "validate_every": 160,
    "anchors": 24,
    "loss": "ce",
}
DRAFTER = {
    "algorithm": "dflash",
    "capture": "low",
    "num_layers": 2,
    "block_size": 4,
    "draft_vocab_size": 256,
    "mask_token_id": 3,
}


def float32_road(checkpoint: Path, drafters: dict[str, dict]) -> MiniRoad:
    """The road up to the trained drafters, in the current folder.

    drafters: name -> what differs from DRAFTER, `training` from TRAINING.
    """
    write_data(rows(PROMPTS, 600), rows(3, 500), rows(PROMPTS, 600))
    config = tiny_config(checkpoint)
    config["target"]["dtype"] = "float32"
    config["responses"]["max_new_tokens"] = LIMIT
    for source in ("learn", "judge"):
        config["sources"][source]["shard_size"] = PROMPTS
    config["drafters"] = {
        name: copy.deepcopy(DRAFTER) | more | {"training": TRAINING | more.get("training", {})}
        for name, more in drafters.items()
    }
    road = MiniRoad(config)
    road.prepare_target()
    for source in ("learn", "choose", "judge"):
        road.to_states(source)
    for name in drafters:
        road.build_draft_vocab(name)
        road.train(name)
    return road


def measured(road: MiniRoad, drafter: str, draft_tokens: int | None = None) -> list[list[int]]:
    """What measure_acceptance finds: tokens of each step of each answer, in the order of answers()."""
    config = copy.deepcopy(road.plan.config)
    config["drafters"][drafter]["draft_tokens"] = draft_tokens
    found = json.loads(MiniRoad(config).measure_acceptance("judge", drafter).read_text())
    assert len(found["per_response"]) == PROMPTS
    emitted = {r["row"]: r["emitted"] for r in found["per_response"]}
    return [emitted[answer["row"]] for answer in answers(road)]


def answers(road: MiniRoad) -> list[dict]:
    """The target's own answers to the test prompts: prompt_ids, response_ids."""
    return sorted(tables.read(road.table("responses", "judge")), key=lambda a: a["row"])
