"""Kimi's tokenizer: its own code where that may run, and a table that finds what the converter splits wrongly."""

import shutil
from pathlib import Path

import pytest
import tiktoken
from tiktoken.load import load_tiktoken_bpe

import families
import kimi_tokenizer
import make_golden_table
from draftmill import golden_table, tables, target_tokenizer
from draftmill.target_manifest import read_manifest
from mini_road import manifest_of, prepared_with, refused_with, write_data
from own_code.tokenization_kimi import PATTERN
from workflow import rows

CHINESE = "请用Python写一个HTTP服务器，谢谢！"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = families.make("kimi_k25", tmp_path_factory.mktemp("kimi") / "made")
    return kimi_tokenizer.put(folder)


@pytest.fixture
def kimi(made, config, tmp_path, modules_of_this_test_alone) -> Path:
    """The checkpoint, which is the configuration's target."""
    folder = tmp_path / "kimi"
    shutil.copytree(made, folder)
    config["target"] = {"path": str(folder)}
    return folder


def table_by_own_code(folder: Path) -> Path:
    output = folder.parent / "golden.jsonl"
    make_golden_table.make(str(folder), None, True, golden_table.PROBES, output)
    return output


def original(folder: Path, text: str) -> list[int]:
    """The ids by tiktoken itself."""
    ranks = load_tiktoken_bpe(str(folder / "tiktoken.model"))
    special = {token: i for i, token in kimi_tokenizer.SPECIAL.items()}
    encoding = tiktoken.Encoding(
        "kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    return encoding.encode(text, allowed_special="all")


def test_without_trust_and_without_a_table_it_is_refused(kimi, config):
    found = refused_with(config)
    assert "no tokenizer.json (found: tiktoken.model, tokenizer_config.json)" in found
    assert "its own code (tokenization_kimi.TikTokenTokenizer) run with" in found


def test_its_own_code_serves_the_whole_road_where_it_may_run(kimi, config):
    write_data([{"id": "a", "prompt": CHINESE}, *rows(2)], rows(3, 500), rows(3, 600))
    road = prepared_with(config, trust=True)
    assert manifest_of(road)["stop_ids"] == [kimi_tokenizer.END]
    road.prepare_prompts("learn")
    road.generate_responses("learn")
    road.tokenize_conversations("learn")
    answer = tables.read(road.table("responses", "learn"))[0]
    prompt = (
        f"<|im_user|>user<|im_middle|>{CHINESE}<|im_end|><|im_assistant|>assistant<|im_middle|>"
    )
    assert answer["prompt_ids"] == original(kimi, prompt)
    sample = tables.read(road.table("tokens", "learn"))[0]
    assert sample["input_ids"][: len(answer["prompt_ids"])] == answer["prompt_ids"]
    tokenizer = target_tokenizer.tokenizer_of(read_manifest(road.target))
    assert type(tokenizer).__module__.startswith("transformers_modules.")
    assert tokenizer.decode(answer["prompt_ids"]) == prompt
    converted = target_tokenizer.load(str(kimi), trust_remote_code=False)
    assert golden_table.ids_of(converted, prompt) != answer["prompt_ids"]


def test_its_own_code_gives_tiktokens_ids_for_every_probe(kimi):
    tokenizer = target_tokenizer.load(str(kimi), trust_remote_code=True)
    for text in golden_table.read_probes():
        assert golden_table.ids_of(tokenizer, text) == original(kimi, text)


def test_what_the_converter_makes_of_it_is_refused_by_its_table_at_a_chinese_text(kimi, config):
    found = refused_with(config, golden=table_by_own_code(kimi))
    assert "TokenizersBackend" in found
    assert "first in '你好，世界！' at token 1" in found
    assert "(Chinese, Han and Latin without spaces, Japanese) typical of a converter" in found


def test_the_table_passes_its_own_code(kimi, config):
    road = prepared_with(config, trust=True, golden=table_by_own_code(kimi))
    assert manifest_of(road)["tokenizer_source"]["trust_remote_code"]


def test_a_conversion_passes_where_its_own_code_splits_as_the_converter_does(kimi, config):
    kimi_tokenizer.use_pattern(kimi, kimi_tokenizer.WITHOUT_HAN)
    road = prepared_with(config, golden=table_by_own_code(kimi))
    tokenizer = target_tokenizer.tokenizer_of(read_manifest(road.target))
    assert type(tokenizer).__name__ == "TokenizersBackend"
    prompt = [{"role": "user", "content": "plain"}]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    text = "<|im_user|>user<|im_middle|>plain<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert ids == original(kimi, text)
