"""The target's tokenizer: its source, its own code, and what of it stands in the plan."""

import json
import shutil

import pytest

from draftmill import target_tokenizer, tokenizer_files
from draftmill.driver.config import completed
from draftmill.driver.plan import Plan
from draftmill.errors import DraftmillError
from mini_road import MiniRoad, manifest_of, prepared_with, refused_with
from tiny_target import edit_tokenizer_config, make_tokenizer
from workflow import Run, tiny_config

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({marker!r}).write_text("ran")
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def with_own_code(tmp_path, tiny_target, modules_of_this_test_alone):
    """A checkpoint whose tokenizer has Python code, and the file that the code writes when imported."""
    folder, marker = tmp_path / "own_code", tmp_path / "ran"
    shutil.copytree(tiny_target, folder)
    (folder / "tokenization_own.py").write_text(CODE.format(marker=str(marker)))
    edit_tokenizer_config(
        folder, auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    )
    edit_tokenizer_config(folder, tokenizer_class="OwnTokenizer")
    return folder, marker


def test_trusting_the_targets_code_runs_no_code_of_the_tokenizer(config, with_own_code):
    folder, marker = with_own_code
    config["target"] = {"path": str(folder), "trust_remote_code": True}
    assert "needs its own code (tokenization_own.OwnTokenizer), which may not run" in refused_with(
        config
    )
    # where transformers knows a class as well
    edit_tokenizer_config(folder, tokenizer_class="TokenizersBackend")
    source = manifest_of(prepared_with(config))["tokenizer_source"]
    assert source == {"folder": str(folder), "trust_remote_code": False, "as_file": False}
    assert not marker.exists()


def test_the_tokenizers_own_code_runs_where_its_own_setting_says_so(config, with_own_code):
    folder, marker = with_own_code
    config["target"] = {"path": str(folder)}
    road = prepared_with(config, trust=True)
    assert marker.exists()
    source = {"folder": str(folder), "trust_remote_code": True, "as_file": False}
    assert manifest_of(road)["tokenizer_source"] == source
    assert type(target_tokenizer.load(**source)).__name__ == "OwnTokenizer"


def test_a_tokenizer_that_only_its_own_code_knows_is_refused_without_it(with_own_code):
    folder, marker = with_own_code
    (folder / "config.json").unlink()
    with pytest.raises(DraftmillError, match="needs its own code"):
        target_tokenizer.load(str(folder), False)
    assert not marker.exists()


def test_a_trusted_tokenizer_runs_no_code_of_the_configuration_beside_it(with_own_code, tmp_path):
    folder, _ = with_own_code
    marker = tmp_path / "configuration ran"
    (folder / "configuration_own.py").write_text(CODE.format(marker=str(marker)))
    config = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnTokenizer"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert type(target_tokenizer.load(str(folder), True)).__name__ == "OwnTokenizer"
    assert not marker.exists()


def test_code_of_another_repository_is_refused(with_own_code):
    folder, marker = with_own_code
    edit_tokenizer_config(
        folder, auto_map={"AutoTokenizer": [None, "else/where--own.OwnTokenizer"]}
    )
    with pytest.raises(DraftmillError, match=r"from another repository .* no revision is pinned"):
        target_tokenizer.load(str(folder), True)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("auto_map", "expected"),
    [
        ({"AutoTokenizer": ["a.A", None]}, ["a.A"]),
        ({"AutoTokenizer": "a.A"}, ["a.A"]),
        (["a.A", "b.B"], ["a.A", "b.B"]),
        ({"AutoProcessor": "a.A"}, []),
    ],
)
def test_every_spelling_of_own_code_is_known(auto_map, expected, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    assert tokenizer_files.own_code(tmp_path) == expected


def test_the_digest_covers_python_files_only_where_they_run(with_own_code):
    folder, _ = with_own_code
    before = [tokenizer_files.tokenizer_digest(folder, code) for code in (False, True)]
    (folder / "helper.py").write_text("x = 1\n")
    after = [tokenizer_files.tokenizer_digest(folder, code) for code in (False, True)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False]


@pytest.mark.parametrize(
    "name", ["added_tokens.json", "qwen.tiktoken", "spiece.model", "vocab.txt"]
)
def test_the_digest_covers_every_kind_of_vocabulary(name, tiny_target, tmp_path):
    shutil.copytree(tiny_target, tmp_path / "copy")
    before = tokenizer_files.tokenizer_digest(tmp_path / "copy", False)
    (tmp_path / "copy" / name).write_text("{}")
    assert tokenizer_files.tokenizer_digest(tmp_path / "copy", False) != before


def planned(config: dict, **tokenizer) -> str:
    config["target"]["tokenizer"] = {k: str(v) for k, v in tokenizer.items()}
    return Plan(completed(config)).fingerprint("prepare_target")


def test_a_moved_table_changes_nothing_and_a_changed_one_does(config, golden, tmp_path):
    before = planned(config, golden=golden)
    moved = golden.rename(tmp_path / "moved.jsonl")
    assert planned(config, golden=moved) == before
    moved.write_bytes(moved.read_bytes() + b" ")
    assert planned(config, golden=moved) != before
    assert planned(config) != before


@pytest.mark.slow
def test_snakemake_sees_a_moved_table_as_the_same_and_a_changed_one_as_another(
    tiny_target, golden, tmp_path
):
    config = tiny_config(tiny_target)
    config["target"]["tokenizer"] = {"golden": str(golden)}
    run = Run(tmp_path / "run", config)
    run.write_data()
    run.snakemake("--until", "prepare_target")
    log = run.folder / "logs/tiny/prepare_target/all.log"
    assert "texts have the ids of" in log.read_text()
    moved = golden.rename(tmp_path / "moved, with spaces.jsonl")
    config["target"]["tokenizer"]["golden"] = str(moved)
    run.write_config(config)
    assert run.stale("--until", "prepare_target") == {}
    moved.write_text(moved.read_text() + '{"text": "Own.", "ids": [9]}\n')
    assert run.stale("--until", "prepare_target") == {"prepare_target": 1}
    assert run.snakemake("--until", "prepare_target", check=False).returncode != 0
    assert "first in 'Own.'" in log.read_text()


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"])
def test_a_changed_file_of_another_folder_changes_the_plan(name, config, tiny_target, tmp_path):
    shutil.copytree(tiny_target, tmp_path / "copy")
    before = planned(config, path=tmp_path / "copy")
    (tmp_path / "copy" / "more.safetensors").write_text("weights are not the tokenizer's")
    (tmp_path / "copy" / ".hidden").write_text("nor is this")
    assert planned(config, path=tmp_path / "copy") == before
    path = tmp_path / "copy" / name
    path.write_bytes(path.read_bytes() + b"\n")
    assert planned(config, path=tmp_path / "copy") != before


@pytest.mark.parametrize("key", ["path", "golden"])
def test_what_is_missing_is_refused_while_planning(key, config):
    with pytest.raises(DraftmillError, match=f"'target.tokenizer.{key}': nowhere"):
        planned(config, **{key: "nowhere"})


def test_a_table_or_folder_that_changed_after_planning_is_refused(
    config, golden, tiny_target, tmp_path
):
    shutil.copytree(tiny_target, tmp_path / "copy")
    given = {"golden": str(golden), "path": str(tmp_path / "copy")}
    config["target"]["tokenizer"] = given
    for path in (golden, tmp_path / "copy" / "tokenizer.json"):
        road = MiniRoad(config)
        road.plan.settings("prepare_target")
        saved = path.read_bytes()
        path.write_bytes(saved + b"\n")
        with pytest.raises(DraftmillError, match="changed after this run was planned"):
            road.prepare_target(golden)
        path.write_bytes(saved)


def test_a_hub_tokenizer_is_fetched_by_its_revision_without_weights(monkeypatch, tmp_path):
    calls = []

    def fetch(name, **options):
        calls.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(target_tokenizer, "snapshot_download", fetch)
    settings = {"path": None, "hub": "a/b", "revision": "c" * 40, "trust_remote_code": False}
    found = target_tokenizer.source_of(settings, "checkpoint")
    assert found == {"folder": str(tmp_path), "trust_remote_code": False}
    [(name, options)] = calls
    assert (name, options["revision"]) == ("a/b", "c" * 40)
    assert "*.safetensors" in options["ignore_patterns"]


def test_the_manifest_carries_the_digests_of_the_tokenizer_that_is_used(
    config, tiny_target, tmp_path
):
    other = make_tokenizer("{{ 'x' }}")
    other.save_pretrained(tmp_path / "other")
    own, changed = (
        manifest_of(prepared_with(config)),
        manifest_of(prepared_with(config, path=tmp_path / "other")),
    )
    assert own["tokenizer"] == changed["tokenizer"]  # the template is no part of it
    assert own["chat_template"] != changed["chat_template"]
    assert own["tokenizer"] == tokenizer_files.tokenizer_digest(tiny_target, False)


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(DraftmillError, match="gone: the folder of the target's tokenizer is gone"):
        target_tokenizer.load(str(tmp_path / "gone"), False)


def test_a_folder_that_does_not_load_is_one_sentence(tmp_path):
    with pytest.raises(DraftmillError, match="the tokenizer does not load"):
        target_tokenizer.load(str(tmp_path), False)
