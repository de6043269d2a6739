"""Bad input: one clear sentence each, and nothing half-written."""

import copy
import json
import os
import subprocess
from pathlib import Path

import pytest

from draftmill import tables
from draftmill.driver.artefacts import artefacts
from draftmill.errors import DraftmillError
from mini_road import MiniRoad, road_of, write_data
from workflow import rows


def written(folder: str) -> list[Path]:
    return [p for p in Path("results/tiny", folder).rglob("*") if p.is_file()]


def given(config: dict, answers: list[str]) -> dict:
    """The configuration with the training source's answers taken from its rows."""
    values = [r | {"response": a} for r, a in zip(rows(len(answers)), answers, strict=True)]
    write_data(values, rows(3, 500), rows(3, 600))
    config["sources"]["learn"]["responses"] = "given"
    return config


def test_an_empty_prompts_file_is_named_before_anything_runs(config):
    Path("data/learn.jsonl").write_text("")
    with pytest.raises(DraftmillError, match=r"data/learn\.jsonl: has no rows"):
        list(artefacts(MiniRoad(config).plan))
    assert written(".") == []


def test_a_broken_line_is_named_by_its_number(config):
    lines = Path("data/learn.jsonl").read_text().splitlines()
    lines[2] = '{"prompt": "unfinished'
    Path("data/learn.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(DraftmillError, match=r"data/learn\.jsonl: row 3: not JSON"):
        MiniRoad(config).prepare_prompts("learn")
    assert written("prompts") == []


def test_a_broken_line_can_be_skipped_and_leaves_a_hole(config):
    lines = Path("data/learn.jsonl").read_text().splitlines()
    lines[2] = '{"prompt": "unfinished'
    Path("data/learn.jsonl").write_text("\n".join(lines) + "\n")
    config["sources"]["learn"]["on_malformed"] = "skip"
    road = MiniRoad(config)
    road.prepare_prompts("learn")
    path = road.table("prompts", "learn")
    assert [row["row"] for row in tables.read(path)] == [0, 1, 3, 4, 5]
    assert len(tables.record_of(path)["skipped"]) == 1


def test_rows_that_change_after_planning_are_refused(config):
    road = MiniRoad(config)
    road.stage("prepare_prompts", source="learn", shard="00000")
    write_data([*rows(5), *rows(1, 77)], rows(3, 500), rows(3, 600))
    with pytest.raises(DraftmillError, match="changed after this run was planned"):
        road.prepare_prompts("learn")


def test_a_prompt_longer_than_the_context_is_named(config, prepared_target):
    write_data([*rows(5), {"prompt": "river stone " * 400}], rows(3, 500), rows(3, 600))
    road = road_of(config, prepared_target)
    road.prepare_prompts("learn")
    with pytest.raises(DraftmillError, match=r"row 6: the prompt has \d+ tokens.* context of 512"):
        road.generate_responses("learn")
    assert written("responses") == []


def test_an_empty_response_in_the_data_is_named(config):
    config = given(config, ["an answer", " ", "another"])
    with pytest.raises(DraftmillError, match="row 2: an empty response"):
        MiniRoad(config).prepare_prompts("learn")
    assert written("prompts") == []


def test_a_conversation_longer_than_the_context_is_named(config, prepared_target):
    road = road_of(given(config, ["short", "word " * 600]), prepared_target)
    road.prepare_prompts("learn")
    with pytest.raises(DraftmillError, match=r"row 2: has \d+ tokens, but the context is 512"):
        road.tokenize_conversations("learn")
    assert written("tokens") == []


@pytest.mark.parametrize("policy", ["keep", "skip", "stop"])
def test_a_response_cut_by_the_length_limit_is_kept_left_out_or_stops(
    config, prepared_target, policy, capsys
):
    config["responses"] |= {"max_new_tokens": 3, "truncated": policy}
    road = road_of(config, prepared_target)
    road.prepare_prompts("judge")
    road.generate_responses("judge")
    answers = tables.read(road.table("responses", "judge"))
    cut = sum(a["finish_reason"] == "length" for a in answers)
    assert cut > 0
    if policy == "stop":
        with pytest.raises(DraftmillError, match=r"row \d: the answer was cut by the length limit"):
            road.tokenize_conversations("judge")
        assert written("tokens") == []
        return
    road.tokenize_conversations("judge")
    kept = tables.read(road.table("tokens", "judge"))
    assert len(kept) == len(answers) - (cut if policy == "skip" else 0)
    assert f"{cut} answers were cut by the length limit" in capsys.readouterr().out


def test_a_template_without_assistant_marks_gives_the_mask_by_comparing_renderings(
    config, prepared_target
):
    road = road_of(given(config, ["first answer", "second answer"]), prepared_target)
    road.prepare_prompts("learn")
    road.tokenize_conversations("learn")
    from draftmill.target_manifest import read_manifest
    from draftmill.target_tokenizer import tokenizer_of

    tokenizer = tokenizer_of(read_manifest(road.target))
    for row, answer in zip(
        tables.read(road.table("tokens", "learn")), ["first answer", "second answer"], strict=True
    ):
        masked = [t for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]
        assert tokenizer.decode(masked) == f"{answer}<|im_end|>"


def test_a_layer_that_the_target_lacks_is_named_with_those_it_has(config):
    config["hidden_states"]["captures"]["low"]["output_of"] = [0, 6]
    with pytest.raises(DraftmillError, match=r"output_of 6, but the target has 6 decoder layers"):
        MiniRoad(config)


def test_the_final_layer_is_refused(config):
    config["hidden_states"]["captures"]["low"]["output_of"] = [0, 5]
    with pytest.raises(DraftmillError, match="final layer"):
        MiniRoad(config)


def test_a_leak_between_roles_is_named_by_both_rows(config):
    shared = rows(1, 601)[0] | {"prompt": rows(1, 2)[0]["prompt"].upper() + " ?"}
    write_data(rows(6), rows(3, 500), [rows(1, 600)[0], shared])
    road = MiniRoad(config)
    for source in ("learn", "choose", "judge"):
        road.prepare_prompts(source)
    with pytest.raises(DraftmillError, match="source 'learn' row 3 and source 'judge' row 2"):
        road.check_leaks()
    assert written("gates") == []


def test_duplicates_within_a_role_stop_or_are_reported(config):
    write_data([*rows(6), rows(1, 4)[0]], rows(3, 500), rows(3, 600))
    road = MiniRoad(config)
    for source in ("learn", "choose", "judge"):
        road.prepare_prompts(source)
    with pytest.raises(DraftmillError, match="source 'learn' row 5 and source 'learn' row 7"):
        road.check_leaks()
    tolerant = copy.deepcopy(config)
    tolerant["leaks"] = {"duplicates": "report"}
    MiniRoad(tolerant).check_leaks()
    assert json.loads(Path("results/tiny/gates/leaks.json").read_text())["duplicates"] == 1


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 40 kB where results/tiny/hidden_states goes."""
    folder = tmp_path / "results/tiny/hidden_states"
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", folder])
    if mounted.returncode != 0:
        if os.environ.get("CI"):
            pytest.fail("CI must be able to mount a tmpfs")
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_during_a_shard_write_is_one_sentence_and_no_file(
    config, prepared_target, small_disk
):
    road = road_of(config, prepared_target)
    road.prepare_prompts("judge")
    road.generate_responses("judge")
    road.tokenize_conversations("judge")
    with pytest.raises(DraftmillError, match=r"00000\.parquet: no space left on the device"):
        road.extract_hidden_states("judge")
    assert written("hidden_states") == []


def test_layers_out_of_order_are_refused(config):
    config["hidden_states"]["captures"]["low"]["output_of"] = [3, 0, 2]
    with pytest.raises(DraftmillError, match="ascending order"):
        MiniRoad(config)


def test_a_length_above_the_targets_context_is_refused(config, prepared_target):
    config["target"]["max_length"] = 100_000
    road = road_of(config, prepared_target)
    road.prepare_prompts("judge")
    with pytest.raises(
        DraftmillError, match="max_length is 100000, but the target's context is 512"
    ):
        road.generate_responses("judge")


def test_a_training_without_a_supervised_token_exports_nothing(ready_road, config):
    config["drafters"]["small"]["training"]["tokens_per_batch"] = 4
    with pytest.raises(DraftmillError, match="supervised token"):
        MiniRoad(config).train()
    assert written("drafters") == []


def test_a_hub_source_that_cannot_be_read_is_one_sentence(config, tmp_path):
    (tmp_path / "empty").mkdir()
    config["sources"]["learn"] |= {"kind": "hub", "id": "empty", "rows": 5}
    with pytest.raises(DraftmillError, match="empty: cannot be read"):
        MiniRoad(config).prepare_prompts("learn")


def test_damaged_memories_of_the_driver_are_made_anew(config):
    before = MiniRoad(config).stage("prepare_prompts", source="learn", shard="00000").text
    for entry in Path(".draftmill/index").iterdir():
        entry.write_bytes(b"half")
    from draftmill.driver import sources

    sources.hashes_at.cache_clear()
    assert MiniRoad(config).stage("prepare_prompts", source="learn", shard="00000").text == before
