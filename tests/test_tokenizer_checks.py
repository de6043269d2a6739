"""What is refused before anything is tokenized: conversions without a table, another model's tokenizer."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from draftmill import golden_table, target_tokenizer, tokenizer_checks, tokenizer_files
from draftmill.errors import DraftmillError
from draftmill.rendering import CannotRender, Renderer
from draftmill.target_manifest import read_manifest
from mini_road import manifest_of, prepared_with, refused_with
from tiny_target import edit_tokenizer_config, make_tokenizer

ROWS, STOP_IDS = 512, [2]  # of the tiny target


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


@pytest.mark.parametrize("name", ["tiktoken.model", "qwen.tiktoken", "tokenizer.model"])
def test_a_tokenizer_that_has_to_be_converted_is_refused_without_a_table(name, config, tmp_path):
    folder = tmp_path / "converted"
    folder.mkdir()
    (folder / name).write_text("IQ== 0\nIg== 1\n")
    found = refused_with(config, path=folder)
    assert f"no tokenizer.json (found: {name}), so transformers converts it" in found
    assert "silently different ids; give target.tokenizer.golden" in found


def test_own_code_is_offered_beside_the_table(config, tmp_path):
    folder = tmp_path / "kimi"
    folder.mkdir()
    (folder / "tiktoken.model").write_text("IQ== 0\n")
    auto_map = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(auto_map))
    assert "its own code (tokenization_kimi.TikTokenTokenizer) run with" in refused_with(
        config, path=folder
    )
    assert not tokenizer_files.is_converted(folder, trust_remote_code=True)


def test_a_conversion_passes_where_a_table_proves_it(config, without_file, golden):
    assert "transformers converts it" in refused_with(config, path=without_file)
    (without_file / "chat_template.jinja").write_text(make_tokenizer().chat_template)
    road = prepared_with(config, path=without_file, golden=golden)
    assert manifest_of(road)["tokenizer_source"]["folder"] == str(without_file)
    road.prepare_prompts("learn")
    road.generate_responses("learn")
    road.tokenize_conversations("learn")
    assert road.table("tokens", "learn").exists()


def test_a_conversion_with_other_ids_is_refused_by_the_table(config, without_file, golden):
    lines = (without_file / "merges.txt").read_text().splitlines()
    (without_file / "merges.txt").write_text("\n".join(lines[:150]) + "\n")
    assert "differs from the golden table in" in refused_with(
        config, path=without_file, golden=golden
    )


def test_a_tokenizer_json_is_checked_against_a_table_as_well(config, golden):
    rows = [json.loads(line) for line in golden.read_text().splitlines()]
    rows[7]["ids"][0] += 1
    golden.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"1 of {len(rows)} texts" in refused_with(config, golden=golden)


def test_a_class_that_does_not_tokenize_as_tokenizer_json_says_gives_way_to_the_file(
    config, tiny_target, tmp_path, capsys
):
    """transformers takes the vocabulary alone for some classes, and their own splitting."""
    shutil.copytree(tiny_target, tmp_path / "llama")
    edit_tokenizer_config(tmp_path / "llama", tokenizer_class="LlamaTokenizer")
    config["target"] = {"path": str(tmp_path / "llama")}
    road = prepared_with(config)
    assert (
        "LlamaTokenizer splits text otherwise than tokenizer.json says" in capsys.readouterr().out
    )
    assert manifest_of(road)["tokenizer_source"]["as_file"]
    found = target_tokenizer.tokenizer_of(read_manifest(road.target))
    own = Tokenizer.from_file(str(tiny_target / "tokenizer.json"))
    for text in golden_table.read_probes():
        ids = own.encode(text, add_special_tokens=False).ids
        assert golden_table.ids_of(found, text) == ids


def test_tokens_added_by_the_tokenizers_configuration_are_no_difference(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    added = {"<|user|>": 512, "<|eot_id|>": 513}
    edit_tokenizer_config(
        tmp_path,
        added_tokens_decoder={str(i): {"content": t, "special": True} for t, i in added.items()},
    )
    loaded = target_tokenizer.load(str(tmp_path), False)
    assert golden_table.ids_of(loaded, "<|eot_id|>") == [513]
    tokenizer_checks.check_own_file(loaded, {"folder": str(tmp_path), "trust_remote_code": False})


def test_the_tiny_targets_tokenizer_fits(tokenizer):
    tokenizer_checks.check_fits(tokenizer, STOP_IDS, ROWS)


def test_an_id_beyond_the_embedding_is_refused_with_its_piece(tokenizer):
    pieces = {index: piece for piece, index in tokenizer.get_vocab().items()}
    with pytest.raises(DraftmillError) as caught:
        tokenizer_checks.check_fits(tokenizer, STOP_IDS, 500)
    assert f"12 tokens of the tokenizer, 500 ({pieces[500]!r}) first" in str(caught.value)


def test_an_added_token_beyond_the_embedding_is_refused_where_text_holds_it(tokenizer):
    """Gemma 3's text-only models have an image token that is no row of their embedding."""
    tokenizer.add_tokens(["<|extra|>"])
    tokenizer_checks.check_fits(tokenizer, STOP_IDS, ROWS)
    renderer = Renderer(tokenizer, {}, STOP_IDS, ROWS)
    assert renderer.prompt_ids([{"role": "user", "content": "plain"}])
    with pytest.raises(CannotRender, match="token 512, which is no row"):
        renderer.prompt_ids([{"role": "user", "content": "with <|extra|>"}])


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
    make_tokenizer(vocab_size=600).save_pretrained(tmp_path / "other")
    assert "have no row among the target's 512 embeddings" in refused_with(
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
