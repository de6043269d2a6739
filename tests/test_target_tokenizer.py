"""The target's tokenizer: its source, its own code, and what is refused as another model's."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import make_golden_table
from draftmill import golden_table, target_tokenizer, tokenizer_checks, tokenizer_files
from draftmill.driver.config import completed
from draftmill.driver.plan import Plan
from draftmill.errors import DraftmillError
from mini_road import MiniRoad
from tiny_target import make_tokenizer

ROWS, STOP_IDS = 512, [2]  # of the tiny target
CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({marker!r}).write_text("ran")
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def modules_of_this_test_alone(tmp_path, monkeypatch):
    """transformers copies a folder's code into a package of modules before it imports it."""
    folder = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
    monkeypatch.setattr("sys.path", [*sys.path])


@pytest.fixture
def with_own_code(tmp_path, tiny_target, modules_of_this_test_alone):
    """A checkpoint whose tokenizer has Python code, and the file that the code writes when imported."""
    folder, marker = tmp_path / "own_code", tmp_path / "ran"
    shutil.copytree(tiny_target, folder)
    (folder / "tokenization_own.py").write_text(CODE.format(marker=str(marker)))
    edit_config(folder, auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]})
    edit_config(folder, tokenizer_class="OwnTokenizer")
    return folder, marker


def edit_config(folder: Path, **changes) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def prepare(config: dict, **tokenizer) -> MiniRoad:
    """The prepared target of a configuration with these settings of the tokenizer."""
    config["target"]["tokenizer"] = {k: str(v) for k, v in tokenizer.items() if k != "trust"}
    config["target"]["tokenizer"]["trust_remote_code"] = tokenizer.get("trust", False)
    road = MiniRoad(config)
    road.prepare_target(tokenizer.get("golden"))
    return road


def manifest_of(road: MiniRoad) -> dict:
    return json.loads(road.target.read_text())


def refusal(config: dict, **tokenizer) -> str:
    with pytest.raises(DraftmillError) as caught:
        prepare(config, **tokenizer)
    return str(caught.value)


@pytest.fixture
def golden(tiny_target, tmp_path) -> Path:
    path = tmp_path / "golden.jsonl"
    make_golden_table.make(str(tiny_target), None, False, golden_table.PROBES, path)
    return path


@pytest.fixture
def without_file(tmp_path) -> Path:
    """A folder with vocab.json and merges.txt: transformers has to convert it."""
    folder = tmp_path / "slow"
    folder.mkdir()
    model = json.loads(make_tokenizer().backend_tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    names = {"eos_token": "<|im_end|>", "tokenizer_class": "GPT2Tokenizer"}
    special = {str(i): {"content": t, "special": True} for t, i in list(model["vocab"].items())[:3]}
    text = json.dumps(names | {"added_tokens_decoder": special})
    (folder / "tokenizer_config.json").write_text(text)
    return folder


# ---- whose code runs -----------------------------------------------------------------------------


def test_trusting_the_targets_code_runs_no_code_of_the_tokenizer(config, with_own_code):
    folder, marker = with_own_code
    config["target"] = {"path": str(folder), "trust_remote_code": True}
    assert "needs its own code (tokenization_own.OwnTokenizer), which may not run" in refusal(
        config
    )
    edit_config(folder, tokenizer_class="TokenizersBackend")  # transformers knows a class as well
    source = manifest_of(prepare(config))["tokenizer_source"]
    assert source == {"folder": str(folder), "trust_remote_code": False}
    assert not marker.exists()


def test_the_tokenizers_own_code_runs_where_its_own_setting_says_so(config, with_own_code):
    folder, marker = with_own_code
    config["target"] = {"path": str(folder)}
    road = prepare(config, trust=True)
    assert marker.exists()
    source = {"folder": str(folder), "trust_remote_code": True}
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
    edit_config(folder, auto_map={"AutoTokenizer": [None, "else/where--own.OwnTokenizer"]})
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


# ---- converted, rebuilt, of another model --------------------------------------------------------


@pytest.mark.parametrize("name", ["tiktoken.model", "qwen.tiktoken", "tokenizer.model"])
def test_a_tokenizer_that_has_to_be_converted_is_refused_without_a_table(name, config, tmp_path):
    folder = tmp_path / "converted"
    folder.mkdir()
    (folder / name).write_text("IQ== 0\nIg== 1\n")
    found = refusal(config, path=folder)
    assert f"no tokenizer.json (found: {name}), so transformers converts it" in found
    assert "silently different ids; give target.tokenizer.golden" in found


def test_own_code_is_offered_beside_the_table(config, tmp_path):
    folder = tmp_path / "kimi"
    folder.mkdir()
    (folder / "tiktoken.model").write_text("IQ== 0\n")
    auto_map = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(auto_map))
    assert "its own code (tokenization_kimi.TikTokenTokenizer) run with" in refusal(
        config, path=folder
    )
    assert not tokenizer_files.is_converted(folder, trust_remote_code=True)


def test_a_conversion_passes_where_a_table_proves_it(config, without_file, golden):
    assert "transformers converts it" in refusal(config, path=without_file)
    (without_file / "chat_template.jinja").write_text(make_tokenizer().chat_template)
    road = prepare(config, path=without_file, golden=golden)
    assert manifest_of(road)["tokenizer_source"]["folder"] == str(without_file)
    road.prepare_prompts("learn")
    road.generate_responses("learn")
    road.tokenize_conversations("learn")
    assert road.table("tokens", "learn").exists()


def test_a_conversion_with_other_ids_is_refused_by_the_table(config, without_file, golden):
    lines = (without_file / "merges.txt").read_text().splitlines()
    (without_file / "merges.txt").write_text("\n".join(lines[:150]) + "\n")
    assert "differs from the golden table in" in refusal(config, path=without_file, golden=golden)


def test_a_tokenizer_json_is_checked_against_a_table_as_well(config, golden):
    rows = [json.loads(line) for line in golden.read_text().splitlines()]
    rows[7]["ids"][0] += 1
    golden.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"1 of {len(rows)} texts" in refusal(config, golden=golden)


def test_a_class_that_does_not_tokenize_as_tokenizer_json_says_is_refused(
    config, tiny_target, tmp_path
):
    """transformers takes the vocabulary alone for some classes, and their own splitting."""
    shutil.copytree(tiny_target, tmp_path / "llama")
    edit_config(tmp_path / "llama", tokenizer_class="LlamaTokenizer")
    config["target"] = {"path": str(tmp_path / "llama")}
    found = refusal(config)
    assert "builds a LlamaTokenizer that does not tokenize as this file says" in found
    edit_config(tmp_path / "llama", tokenizer_class="TokenizersBackend")
    assert prepare(config)


def test_tokens_added_by_the_tokenizers_configuration_are_no_difference(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    added = {"<|user|>": 512, "<|eot_id|>": 513}
    edit_config(
        tmp_path,
        added_tokens_decoder={str(i): {"content": t, "special": True} for t, i in added.items()},
    )
    loaded = target_tokenizer.load(str(tmp_path), False)
    assert golden_table.ids_of(loaded, "<|eot_id|>") == [513]
    tokenizer_checks.check_own_file(loaded, str(tmp_path), False)


def test_the_tiny_targets_tokenizer_fits(tokenizer):
    tokenizer_checks.check_fits(tokenizer, STOP_IDS, ROWS)


def test_an_id_beyond_the_embedding_is_refused_with_its_piece(tokenizer):
    pieces = {index: piece for piece, index in tokenizer.get_vocab().items()}
    with pytest.raises(DraftmillError) as caught:
        tokenizer_checks.check_fits(tokenizer, STOP_IDS, 500)
    assert f"12 tokens of the tokenizer, 500 ({pieces[500]!r}) first" in str(caught.value)


def test_added_tokens_count_as_well(tokenizer):
    tokenizer.add_tokens(["<|extra|>"])
    with pytest.raises(DraftmillError, match=r"1 tokens .* 512 \('<\|extra\|>'\) first"):
        tokenizer_checks.check_fits(tokenizer, STOP_IDS, ROWS)
    tokenizer_checks.check_fits(tokenizer, [*STOP_IDS, 512], ROWS + 1)


def test_a_stop_id_that_is_ordinary_text_shows_which(tokenizer):
    piece = tokenizer.convert_ids_to_tokens(300)
    with pytest.raises(DraftmillError) as caught:
        tokenizer_checks.check_fits(tokenizer, [2, 300], ROWS)
    assert f"with token 300, which in this tokenizer is {piece!r}, not a special" in str(
        caught.value
    )


def test_a_stop_id_that_is_no_token_is_refused(tokenizer):
    with pytest.raises(DraftmillError, match="token 600, which in this tokenizer is no token"):
        tokenizer_checks.check_fits(tokenizer, [600], 1000)


def test_another_models_tokenizer_stops_the_target(config, tmp_path):
    other = make_tokenizer()
    other.add_tokens([f"<|extra_{i}|>" for i in range(9)])
    other.save_pretrained(tmp_path / "other")
    assert "have no row among the target's 512 embeddings" in refusal(
        config, path=tmp_path / "other"
    )


def test_markers_that_are_no_tokens_are_told_and_stop_nothing(tokenizer, tokenizer_with):
    assert tokenizer_checks.unknown_markers(tokenizer) == []
    template = (
        "{{ '<|im_start|>' }}{{ '<|user|>' + '<start_of_turn>' + '<｜User｜>' }}{{ a < b | c > d }}"
    )
    found = tokenizer_checks.unknown_markers(tokenizer_with(template))
    assert found == ["<start_of_turn>", "<|user|>", "<｜User｜>"]
    assert tokenizer_checks.unknown_markers(tokenizer_with(None)) == []


# ---- the plan ------------------------------------------------------------------------------------


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
        manifest_of(prepare(config)),
        manifest_of(prepare(config, path=tmp_path / "other")),
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
