"""Sources: shard ranges, digests of rows, and reading the rows themselves."""

import gzip
import json
import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill import raw_rows
from draftmill.driver import sources
from draftmill.driver.config import completed
from draftmill.errors import DraftmillError

PROMPTS = [{"prompt": f"Question {i}?"} for i in range(45)]


@pytest.fixture
def source(base_config):
    """Settings of a source -> the same with every default."""

    def make(**settings) -> dict:
        base_config["sources"]["probe"] = {"kind": "file", "role": "train"} | settings
        return completed(base_config)["sources"]["probe"]

    return make


@pytest.fixture
def rows_file(workplace, write_rows) -> Path:
    return write_rows(workplace / "rows.jsonl", PROMPTS)


def digests(settings: dict) -> list[str]:
    ranges = sources.row_ranges("probe", settings)
    return [sources.rows_digest(settings, start, stop) for start, stop in ranges]


def edit(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1
    time.sleep(0.02)  # longer than the tick of the file system's clock
    with open(path, "r+b") as file:  # in place, so that the inode stays
        file.write(data.replace(old, new))


def test_a_higher_limit_keeps_every_full_shard(source, rows_file):
    def ranges(limit: int) -> list[tuple[int, int]]:
        return sources.row_ranges("probe", source(path=str(rows_file), limit=limit, shard_size=10))

    assert ranges(10) == [(0, 10)]
    assert ranges(15) == [(0, 10), (10, 15)]
    assert ranges(40) == [(0, 10), (10, 20), (20, 30), (30, 40)]


@given(
    total=st.integers(1, 60),
    offset=st.integers(0, 59),
    limit=st.none() | st.integers(1, 80),
    size=st.integers(1, 70),
)
def test_shards_cover_exactly_the_used_rows_once(total, offset, limit, size):
    settings = {"kind": "hub", "id": "a/b", "rows": total}
    settings |= {"offset": offset, "limit": limit, "shard_size": size}
    if offset >= total:
        with pytest.raises(DraftmillError, match="offset"):
            sources.row_ranges("probe", settings)
        return
    found = sources.row_ranges("probe", settings)
    used = [row for start, stop in found for row in range(start, stop)]
    assert used == list(range(total))[offset:][:limit]
    assert all(stop - start == size for start, stop in found[:-1])


def test_appending_a_row_keeps_the_digests_of_full_shards(source, rows_file):
    settings = source(path=str(rows_file), shard_size=10)
    before = digests(settings)
    with open(rows_file, "ab") as file:
        file.write(b'{"prompt": "one more"}\n')
    after = digests(settings)
    assert after[:4] == before[:4]
    assert after[4] != before[4]


def test_appending_beyond_the_limit_changes_no_digest(source, rows_file):
    settings = source(path=str(rows_file), shard_size=10, limit=25)
    before = digests(settings)
    with open(rows_file, "ab") as file:
        file.write(b'{"prompt": "one more"}\n')
    assert digests(settings) == before


def test_a_changed_row_changes_only_the_digest_of_its_shard(source, rows_file):
    settings = source(path=str(rows_file), shard_size=10)
    before = digests(settings)
    edit(rows_file, b"Question 23?", b"Question XX?")
    assert [a == b for a, b in zip(before, digests(settings), strict=True)] == [
        True,
        True,
        False,
        True,
        True,
    ]


def test_a_change_that_puts_the_old_mtime_back_is_noticed(source, rows_file):
    settings = source(path=str(rows_file), shard_size=50)
    before, whole = digests(settings), sources.file_digest(rows_file)
    stat = os.stat(rows_file)
    edit(rows_file, b"Question 7?", b"Question X?")
    os.utime(rows_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = os.stat(rows_file)
    assert (after.st_mtime_ns, after.st_size) == (stat.st_mtime_ns, stat.st_size)
    assert digests(settings) != before
    assert sources.file_digest(rows_file) != whole


def test_an_unchanged_file_is_read_once(source, rows_file, monkeypatch):
    settings = source(path=str(rows_file), shard_size=10)
    before = digests(settings)
    monkeypatch.setattr(sources, "file_rows", lambda path: pytest.fail("read again"))
    assert digests(settings) == before


def test_moving_rows_between_shards_is_noticed(source, workplace, write_rows):
    first = write_rows(workplace / "first.jsonl", PROMPTS[:4])
    swapped = [PROMPTS[1], PROMPTS[0], *PROMPTS[2:4]]
    second = write_rows(workplace / "second.jsonl", swapped)
    assert digests(source(path=str(first))) != digests(source(path=str(second)))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.jsonl", b"", "has no rows"),
        ("rows.csv", b"a,b\n", "unknown file type"),
        ("broken.jsonl.gz", b"not gzip", "broken"),
        ("cut.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 99)[:-12], "cut"),
        ("broken.parquet", b"PAR1", "broken"),
    ],
    ids=["no rows", "other type", "no gzip", "truncated gzip", "no parquet"],
)
def test_a_file_that_cannot_be_a_source_is_refused_by_name(
    name, content, reason, source, workplace
):
    (workplace / name).write_bytes(content)
    with pytest.raises(DraftmillError, match=reason) as caught:
        digests(source(path=name))
    assert name in str(caught.value)


def test_a_missing_file_is_refused_by_its_key_and_name(source, workplace):
    with pytest.raises(DraftmillError, match=r"sources\.probe\.path.*gone\.jsonl does not exist"):
        digests(source(path="gone.jsonl"))


def test_an_offset_past_the_end_is_refused_with_the_number_of_rows(source, rows_file):
    with pytest.raises(DraftmillError, match=r"sources\.probe\.offset' is 45, .* 45 rows"):
        digests(source(path=str(rows_file), offset=45))


def test_compressed_and_parquet_files_hold_the_same_rows(source, rows_file):
    packed, table = rows_file.with_name("rows.jsonl.gz"), rows_file.with_name("rows.parquet")
    packed.write_bytes(gzip.compress(rows_file.read_bytes()))
    pq.write_table(pa.Table.from_pylist(PROMPTS), table, row_group_size=7)
    for path in (packed, table):
        settings = source(path=str(path), offset=5, limit=30, shard_size=20)
        assert sources.row_ranges("probe", settings) == [(5, 25), (25, 35)]
        for start, stop in [(0, 45), (5, 25), (13, 15), (44, 45)]:
            found = [json.loads(row) for row in raw_rows.rows_of(settings, start, stop)]
            assert found == PROMPTS[start:stop]


lines = st.lists(st.binary(max_size=12).filter(lambda b: not {10, 13} & set(b)), max_size=12)


@given(rows=lines, start=st.integers(0, 13), size=st.integers(0, 13), ended=st.booleans())
def test_rows_read_from_a_file_are_the_rows_of_the_range(
    rows, start, size, ended, tmp_path_factory
):
    path = tmp_path_factory.getbasetemp() / "bytes.jsonl"
    text = b"".join(row + b"\n" for row in rows)
    path.write_bytes(text if ended or not rows or not rows[-1] else text[:-1])
    settings = {"kind": "file", "path": str(path)}
    expected = rows[start : start + size]
    assert raw_rows.rows_of(settings, start, start + size) == expected


def test_stdlib_prompts_are_distinct_and_their_ranges_disjoint():
    rows = raw_rows.rows_of({"kind": "stdlib"}, 0, 10**9)
    assert len({row.split(b"`")[1] for row in rows}) == len(rows) > 6500
    assert raw_rows.rows_of({"kind": "stdlib"}, 100, 103) == rows[100:103]


@pytest.mark.parametrize("split", [None, "train"])
def test_a_saved_data_set_is_read_by_its_rows(split, source, workplace):
    import datasets

    data = datasets.Dataset.from_list(PROMPTS)
    (datasets.DatasetDict({split: data}) if split else data).save_to_disk("saved")
    settings = source(kind="hub", id="saved", rows=45)
    found = [json.loads(row) for row in raw_rows.rows_of(settings, 40, 99)]
    assert found == PROMPTS[40:]
    with pytest.raises(DraftmillError, match="has 45 rows, but the configuration says rows: 44"):
        raw_rows.rows_of(settings | {"rows": 44}, 0, 1)


def test_a_changed_data_set_folder_has_another_digest(source, workplace):
    folder = workplace / "saved"
    folder.mkdir()
    (folder / "data.arrow").write_bytes(b"rows")
    settings = source(kind="hub", id="saved", rows=4)
    before = digests(settings)
    edit(folder / "data.arrow", b"rows", b"cows")
    sources.folder_digest.cache_clear()  # remembered within one invocation
    assert digests(settings) != before
