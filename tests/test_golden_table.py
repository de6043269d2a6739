"""Golden tables: a converter that gives other ids is found, and a table that could not find it is refused."""

import json
import sys

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import make_golden_table
from draftmill import golden_table
from draftmill.errors import DraftmillError
from tiny_target import SPECIAL, make_tokenizer

# transformers' pattern for tiktoken files; Kimi's own begins with a branch for Han characters
CONVERTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OWN = r"[\p{Han}]+|" + CONVERTERS


def split_by(pattern: str):
    steps = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(steps)


@pytest.fixture(scope="module")
def probes() -> dict[str, str]:
    return golden_table.read_probes()


@pytest.fixture(scope="module")
def pair(probes):
    """The model's own tokenizer and its conversion: one vocabulary, patterns that differ in one branch."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = split_by(CONVERTERS)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([*probes] * 4, trainer)

    def fast(pattern: str) -> PreTrainedTokenizerFast:
        tokenizer = Tokenizer.from_str(trained.to_str())
        tokenizer.pre_tokenizer = split_by(pattern)
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")

    return fast(OWN), fast(CONVERTERS)


@pytest.fixture
def table(tmp_path, pair, probes):
    """Rows or nothing -> a table file, by the model's own tokenizer unless given."""

    def write(rows: list[dict] | None = None):
        if rows is None:
            rows = [{"text": text, "ids": golden_table.ids_of(pair[0], text)} for text in probes]
        path = tmp_path / "golden.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def refusal(tokenizer, path) -> str:
    with pytest.raises(DraftmillError) as caught:
        golden_table.check(tokenizer, path)
    return str(caught.value)


def test_the_probes_hold_what_converters_go_wrong_on(probes):
    assert 60 <= len(probes) <= 100
    text = "\n".join(probes)
    for part in ("<|im_start|>", "\u200d", "\U0001f1e9\U0001f1ea", "\U0001f3fd", "\r\n", "\t\t"):
        assert part in text
    assert {"Chinese", "Japanese", "Korean", "Arabic", "Hebrew", "Hindi", "Thai", "digits"} <= {
        *probes.values()
    }


def test_a_tokenizer_fits_its_own_table(pair, table, probes):
    assert golden_table.check(pair[0], table()) == len(probes)


def test_a_converter_without_the_han_branch_is_found_at_a_chinese_text(pair, table, probes):
    found = refusal(pair[1], table())
    text = next(
        t for t in probes if golden_table.ids_of(pair[0], t) != golden_table.ids_of(pair[1], t)
    )
    assert probes[text] in ("Chinese", "Han and Latin without spaces")
    assert repr(text) in found
    assert "typical of a converter" in found


def test_english_and_code_alone_would_not_have_found_it(pair, probes):
    plain = [text for text in probes if text.isascii()]
    assert len(plain) > 20
    for text in plain:
        assert golden_table.ids_of(pair[0], text) == golden_table.ids_of(pair[1], text)


def test_the_first_difference_is_named_by_position_ids_and_texts(pair, table):
    rows = rows_of(table())
    changed, other = rows[4], rows[5]["ids"][0]
    before = changed["ids"][2]
    assert other != before
    changed["ids"][2] = other
    found = refusal(pair[0], table(rows))
    assert f"1 of {len(rows)} texts, first in {golden_table.shown(changed['text'])}" in found
    assert f"at token 2: expected {other} ({pair[0].decode([other])!r})" in found
    assert f"found {before} ({pair[0].decode([before])!r})" in found


def test_ids_that_end_early_differ_at_the_end(pair, table):
    rows = rows_of(table())
    rows[0]["ids"].pop()
    assert f"at token {len(rows[0]['ids'])}: expected the end, found" in refusal(
        pair[0], table(rows)
    )


def test_an_id_that_the_tokenizer_lacks_is_shown_as_such(pair, table):
    rows = rows_of(table())
    rows[0]["ids"][0] = 99999
    assert "expected 99999 (no token here)" in refusal(pair[0], table(rows))


def test_many_differences_are_told_as_the_wrong_tokenizer(table):
    assert "so many differences mean the wrong tokenizer" in refusal(make_tokenizer(), table())


def test_differing_special_tokens_alone_are_told_as_another_revision(pair, table):
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(pair[0].backend_tokenizer.to_str())
    )
    other.add_special_tokens({"additional_special_tokens": ["<|eot_id|>"]})
    assert "only special tokens written in text differ" in refusal(other, table())


def test_an_empty_table_is_refused(pair, table):
    assert "the golden table is empty" in refusal(pair[0], table([]))


def test_every_category_must_be_there(pair, table, probes):
    rows = rows_of(table())
    for category in {*probes.values()}:
        kept = [row for row in rows if probes[row["text"]] != category]
        assert f"has no probe of {category} (" in refusal(pair[0], table(kept))


def test_a_table_of_english_is_refused(pair, table):
    rows = [row for row in rows_of(table()) if row["text"].isascii()]
    found = refusal(pair[0], table(rows))
    for category in ("Chinese", "Japanese", "Korean", "emoji flags"):
        assert category in found


def test_texts_of_ones_own_beside_the_probes_are_compared_as_well(pair, table):
    rows = rows_of(table())
    assert golden_table.check(
        pair[0], table([*rows, {"text": "Own.", "ids": golden_table.ids_of(pair[0], "Own.")}])
    )
    assert "first in 'Own.'" in refusal(pair[0], table([*rows, {"text": "Own.", "ids": [9]}]))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is no JSON"),
        ("", "is no JSON"),
        ("[1]", "is no JSON object"),
        ('{"ids": [1]}', "'text'"),
        ('{"text": "", "ids": [1]}', "'text'"),
        ('{"text": "\\ud800", "ids": [1]}', "'text'"),
        ('{"text": "a"}', "'ids'"),
        ('{"text": "a", "ids": []}', "'ids'"),
        ('{"text": "a", "ids": [1.0]}', "'ids'"),
        ('{"text": "a", "ids": [true]}', "'ids'"),
        ('{"text": "a", "ids": [-1]}', "'ids'"),
        ('{"text": "a", "ids": "1"}', "'ids'"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(line, reason, pair, table):
    path = table()
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n", encoding="utf-8")
    found = refusal(pair[0], path)
    assert f"{path}: line 3: " in found
    assert reason in found


def test_two_lists_of_ids_for_one_text_are_refused(pair, table):
    rows = rows_of(table())
    assert "line 2: gives" in refusal(pair[0], table([rows[0], rows[0] | {"ids": [1]}, *rows]))


def test_a_line_separator_within_a_text_ends_no_line(pair, table):
    rows = rows_of(table())
    text = "a\u2028b\x85c"
    own = {"text": text, "ids": golden_table.ids_of(pair[0], text)}
    path = table(rows)
    raw = json.dumps(own, ensure_ascii=False) + "\n"
    path.write_text(path.read_text(encoding="utf-8") + raw, encoding="utf-8", newline="")
    assert golden_table.check(pair[0], path) == len(rows) + 1


def test_the_tool_makes_a_table_that_refuses_the_converter(pair, tmp_path, monkeypatch, capsys):
    pair[0].save_pretrained(tmp_path / "own")
    output = tmp_path / "made.jsonl"
    arguments = ["--tokenizer", str(tmp_path / "own"), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["make_golden_table.py", *arguments])
    make_golden_table.main()
    assert "TokenizersBackend" in capsys.readouterr().out
    assert golden_table.check(pair[0], output)
    assert "typical of a converter" in refusal(pair[1], output)


def make(folder, output, **options):
    options = {"revision": None, "trust": False, "probes": golden_table.PROBES} | options
    make_golden_table.make(str(folder), output=output, **options)


def test_the_tool_refuses_what_would_only_be_a_conversion(tmp_path):
    (tmp_path / "tiktoken.model").write_text("IQ== 0\n")
    with pytest.raises(DraftmillError, match="converter's table proves nothing"):
        make(tmp_path, tmp_path / "made.jsonl")


@pytest.mark.parametrize("revision", [None, "main"])
def test_the_tool_asks_for_a_pinned_revision_of_a_repository(tmp_path, revision):
    with pytest.raises(DraftmillError, match="needs --revision"):
        make("some/model", tmp_path / "made.jsonl", revision=revision)


def test_the_tool_refuses_a_tokenizer_that_loses_text(tmp_path):
    lossy = Tokenizer(models.WordLevel({"[UNK]": 0, "The": 1}, unk_token="[UNK]"))
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=lossy).save_pretrained(tmp_path / "lossy")
    with pytest.raises(DraftmillError, match="loses text"):
        make(tmp_path / "lossy", tmp_path / "made.jsonl")
    assert not (tmp_path / "made.jsonl").exists()


def test_a_normalised_text_is_only_told(pair, tmp_path, capsys):
    from tokenizers import normalizers

    own = Tokenizer.from_str(pair[0].backend_tokenizer.to_str())
    own.normalizer = normalizers.NFC()
    PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(tmp_path / "nfc")
    make(tmp_path / "nfc", tmp_path / "made.jsonl")
    told = [line for line in capsys.readouterr().out.splitlines() if "does not decode" in line]
    assert 0 < len(told) < 10
