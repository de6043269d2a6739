"""Published figures: every row says how it was counted, and a target finds its own under any of its names."""

import csv

import pytest

from draftmill import published

COLUMNS = [
    *("algorithm", "target", "drafter", "benchmark", "tau", "speedup", "temperature", "thinking"),
    *("draft_tokens", "block", "drafting", "max_new_tokens", "counting", "source"),
]


def test_the_table_has_its_columns_and_no_row_twice():
    with open(published.TABLE, encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file, delimiter="\t"))
    assert lines[0] == COLUMNS
    assert {len(line) for line in lines} == {len(COLUMNS)}
    assert len({tuple(line) for line in lines}) == len(lines)


@pytest.mark.parametrize("row", published.table(), ids=lambda row: row["source"][:12])
def test_a_row_says_how_it_was_counted_and_where_it_stands(row):
    assert row["algorithm"] in ("eagle3", "dflash", "dspark")
    assert row["counting"] in ("pooled", "mean of means", "unstated")
    assert row["drafting"] in ("tree", "chain", "block", None)
    assert row["thinking"] in ("yes", "no", None)
    assert all(row[key] for key in ("source", "target", "benchmark"))
    longest = row["block"] + 1 if row["block"] else (row["draft_tokens"] or 60) + 1
    assert 1 <= row["tau"] <= longest
    assert row["speedup"] is None or 1 <= row["speedup"] < row["tau"]


def test_the_mean_of_a_paper_is_that_of_its_rows():
    checked = 0
    for row in published.table():
        same = ("algorithm", "target", "source", "temperature", "draft_tokens", "block")
        parts = [
            other["tau"]
            for other in published.table()
            if other["benchmark"] != "mean" and all(other[k] == row[k] for k in same)
        ]
        if row["benchmark"] == "mean" and parts:
            assert row["tau"] == pytest.approx(sum(parts) / len(parts), abs=0.011), row
            checked += 1
    assert checked == 6


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B-Instruct"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "Llama-3.1-8B-Instruct"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "Llama-3.3-70B-Instruct"),
        ("Qwen/Qwen3-8B-FP8", "Qwen3-8B"),
        ("Qwen/Qwen3-8B-AWQ", "Qwen3-8B"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen3-8B-unsloth"),
        ("nvidia/Kimi-K2.5-NVFP4", "moonshotai/Kimi-K2.5"),
        ("/models/qwen3-4b/", "Qwen/Qwen3-4B"),
        ("Qwen3.5-27B-GPTQ-Int4", "Qwen3.5-27B"),
        ("google/gemma-3-27b-it-qat-q4_0-gguf", "gemma-3-27b-it-qat"),
    ],
)
def test_names_of_one_target_are_one(name, same):
    assert published.base_name(name) == published.base_name(same)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B"),
        ("Qwen/Qwen3-8B-Base", "Qwen3-8B"),
        ("Qwen/Qwen3-4B", "Qwen3-8B"),
        ("moonshotai/Kimi-K2.6", "Kimi-K2.5"),
        ("Qwen/Qwen3.5-27B", "Qwen3.6-27B"),
    ],
)
def test_names_of_two_targets_are_two(name, other):
    assert published.base_name(name) != published.base_name(other)


def test_rows_are_of_the_target_and_the_algorithm():
    found = published.rows("Qwen/Qwen3-8B-FP8", "dflash")
    assert {(row["target"], row["algorithm"]) for row in found} == {("Qwen3-8B", "dflash")}
    [human] = [r for r in found if r["benchmark"] == "HumanEval" and r["temperature"] == 0]
    assert (human["tau"], human["speedup"], human["block"]) == (6.5, 5.14, 16)
    assert human["max_new_tokens"] == 2048
    assert {row["algorithm"] for row in published.rows("Qwen3-8B")} == {
        "eagle3",
        "dflash",
        "dspark",
    }
    assert published.rows("HuggingFaceTB/SmolLM2-135M-Instruct") == []


@pytest.mark.parametrize(
    ("target", "algorithm", "found"),
    [
        ("Qwen/Qwen3.6-27B", "dflash", {"Qwen3.5-27B"}),
        ("Qwen/Qwen3-4B", "eagle3", {"Qwen3-8B"}),
        ("moonshotai/Kimi-K2-Instruct", "eagle3", {"Kimi-K2.5"}),
    ],
)
def test_an_unpublished_target_has_the_figures_of_the_nearest_name_in_its_family(
    target, algorithm, found
):
    rows = published.closest(target, algorithm)
    assert {row["target"] for row in rows} == found
    assert {row["algorithm"] for row in rows} == {algorithm}


def test_a_target_of_a_family_without_figures_has_the_means_of_all_others():
    rows = published.closest("SmolLM2-135M-Instruct", "eagle3")
    assert {row["benchmark"] for row in rows} == {"mean"}
    assert len({row["target"] for row in rows}) > 2
    assert published.closest("SmolLM2-135M-Instruct", "no such algorithm") == []
