"""Hidden-state shards: every bit comes back, and no damage passes."""

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill import shard_layout
from draftmill.dtype_policy import DTYPES
from draftmill.errors import DraftmillError
from draftmill.shard_reader import Shard
from draftmill.shard_writer import new_shard

RECORD = {"fingerprint": "0123456789abcdef"}
BITS = {"bfloat16": torch.int16, "float32": torch.int32}


def random_states(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Every bit pattern may occur: infinities, NaN payloads and denormals included."""
    kind, generator = BITS[dtype], torch.Generator().manual_seed(seed)
    info = torch.iinfo(kind)
    bits = torch.randint(info.min, info.max + 1, shape, generator=generator, dtype=torch.int64)
    return bits.to(kind).view(DTYPES[dtype])


def write(path: Path, lengths: list[int], layers: list[int], hidden: int, dtype: str) -> list[dict]:
    """A shard of random states; returns what its samples must read as."""
    columns = [*map(shard_layout.column_of, layers), shard_layout.LAST]
    expected = []
    with new_shard(path, layers, hidden, dtype, RECORD) as shard:
        for number, tokens in enumerate(lengths):
            ids = [(7 * number + i) % 512 for i in range(tokens)]
            mask = [int(i % 3 > 0) for i in range(tokens)]
            seeds = range(100 * number, 100 * number + len(columns))
            states = [random_states((tokens, hidden), dtype, seed) for seed in seeds]
            about = {"row": number, "turn": 1, "category": "all", "start": 1}
            shard.append(about, ids, mask, states)
            found = {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask).bool()}
            expected.append(found | dict(zip(columns, states, strict=True)))
    return expected


def read_all(path: Path, dtype: str) -> tuple[dict, list[dict]]:
    shard = Shard(path, dtype)
    names = shard.file.schema_arrow.names
    return shard.footer, [shard.read(i, names) for i in range(len(shard.samples))]


def same(first: list[dict], second: list[dict]) -> bool:
    """Equality of dtypes, shapes and bits; torch.equal says that a NaN is not itself."""

    def key(sample: dict) -> list:
        return [
            (n, t.dtype, tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes())
            for n, t in sample.items()
        ]

    return [key(s) for s in first] == [key(s) for s in second]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Path, tuple[dict, list[dict]]]:
    path = tmp_path_factory.mktemp("small") / "00000.parquet"
    write(path, [2, 3], [1], 4, "bfloat16")
    return path, read_all(path, "bfloat16")


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=4),
    layers=st.lists(st.integers(0, 40), min_size=1, max_size=4, unique=True),
    hidden=st.integers(1, 9),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_every_shape_comes_back_bit_by_bit(lengths, layers, hidden, dtype, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "shapes.parquet"
    expected = write(path, lengths, layers, hidden, dtype)
    footer, found = read_all(path, dtype)
    assert same(found, expected)
    assert footer["layers"] == {"output_of": layers}
    assert (footer["hidden_size"], footer["dtype"]) == (hidden, dtype)
    assert [s["tokens"] for s in footer["samples"]] == lengths
    assert footer["tokens"] == sum(lengths)
    assert footer["record"] == RECORD


def test_all_65536_bfloat16_values_come_back_with_their_payloads(tmp_path):
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(256, 256)
    path = tmp_path / "all.parquet"
    with new_shard(path, [0], 256, "bfloat16", RECORD) as shard:
        shard.append({}, range(256), [1] * 256, [values.view(torch.bfloat16)] * 2)
    found = Shard(path, "bfloat16").read(0, ["output_of_0", "last"])
    assert torch.equal(found["output_of_0"].view(torch.int16), values)
    assert torch.equal(found["last"].view(torch.int16), values)


def test_a_state_that_is_a_slice_or_a_transposed_view_is_stored_by_its_values(tmp_path):
    base = random_states((6, 9), "float32", 1)
    with new_shard(tmp_path / "a.parquet", [0], 4, "float32", RECORD) as shard:
        shard.append({}, range(3), [1] * 3, [base[1:4, 2:6], base.T[2:5, 1:5]])
    found = Shard(tmp_path / "a.parquet", "float32").read(0, ["output_of_0", "last"])
    expected = {"output_of_0": base[1:4, 2:6], "last": base.T[2:5, 1:5]}
    assert same([found], [expected])


def test_plain_pyarrow_reads_a_shard_with_one_row_group_per_sample(tmp_path):
    path = tmp_path / "plain.parquet"
    expected = write(path, [3, 1, 5], [2, 4], 8, "bfloat16")
    table, metadata = pq.read_table(path), pq.read_metadata(path)
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [3, 1, 5]
    assert (
        table.column("input_ids").to_pylist()
        == torch.cat([s["input_ids"] for s in expected]).tolist()
    )
    for name in ("output_of_2", "output_of_4", "last"):
        rows = torch.cat([s[name] for s in expected]).view(torch.uint8)
        assert table.column(name).to_pylist() == [bytes(row.tolist()) for row in rows]
    assert json.loads(metadata.metadata[b"draftmill"])["complete"] == 1


@contextmanager
def flipped(path: Path, place: int, bit: int) -> Iterator[None]:
    """The file with one bit changed in place; afterwards it is as before."""
    with open(path, "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, place)[0]
        os.pwrite(file.fileno(), bytes([byte ^ (1 << bit)]), place)
        yield
        os.pwrite(file.fileno(), bytes([byte]), place)


def places_of_states(data: bytes, samples: list[dict]) -> set[int]:
    """Where in the file the bytes of the states stand."""
    places = set()
    for sample in samples:
        for name in ("output_of_1", "last"):
            raw = sample[name].view(torch.uint8).numpy().tobytes()
            places |= set(range(data.index(raw), data.index(raw) + len(raw)))
    return places


def test_no_flipped_bit_ever_gives_other_data(small, tmp_path):
    """Every bit of the pages and page headers, and two of every byte of the footer."""
    path, expected = small
    damaged, random_bits = tmp_path / "damaged.parquet", random.Random(0)
    damaged.write_bytes(path.read_bytes())
    footer_start, size = shard_layout.footer_of(path)[0], path.stat().st_size
    states = places_of_states(path.read_bytes(), expected[1])
    assert len(states) == 2 * (2 + 3) * 4 * 2  # columns, tokens, hidden, bytes
    for place in range(size):
        for bit in range(8) if place < footer_start else random_bits.sample(range(8), 2):
            with flipped(damaged, place, bit):
                try:
                    found = read_all(damaged, "bfloat16")
                except DraftmillError as error:
                    found = str(error)
            if isinstance(found, str):
                assert str(damaged) in found, (place, bit)
                continue
            assert found[0] == expected[0], (place, bit)
            assert same(found[1], expected[1]), (place, bit)
            assert place not in states, (place, bit)
    assert same(read_all(damaged, "bfloat16")[1], expected[1])


def test_a_flipped_bit_anywhere_in_a_state_of_several_pages_is_refused(tmp_path):
    path = tmp_path / "large.parquet"
    expected = write(path, [700], [0], 1024, "bfloat16")
    size = path.stat().st_size
    for place in random.Random(0).sample(range(20_000, size - 20_000), 8):
        with (
            flipped(path, place, 4),
            pytest.raises(DraftmillError, match=r"large\.parquet: damaged"),
        ):
            read_all(path, "bfloat16")
    assert same(read_all(path, "bfloat16")[1], expected)


def test_a_truncated_shard_is_refused_by_name(small, tmp_path):
    data, cut = small[0].read_bytes(), tmp_path / "cut.parquet"
    lengths = {0, 1, 3, 4, 7, 8, 11, 12, 47, 48, len(data) - 1, len(data) - 8, len(data) - 9}
    for length in sorted(lengths | set(range(20, len(data), len(data) // 45))):
        cut.write_bytes(data[:length])
        with pytest.raises(DraftmillError) as caught:
            read_all(cut, "bfloat16")
        assert str(caught.value).startswith(str(cut))


def test_bytes_after_the_end_or_in_the_middle_are_refused(small, tmp_path):
    data, longer = small[0].read_bytes(), tmp_path / "longer.parquet"
    for place in (4, 100, len(data) - 8, len(data)):
        longer.write_bytes(data[:place] + b"\0" + data[place:])
        with pytest.raises(DraftmillError, match=r"longer\.parquet"):
            read_all(longer, "bfloat16")


def test_a_shard_rewritten_by_another_tool_is_refused(small, tmp_path):
    other = tmp_path / "other.parquet"
    pq.write_table(pq.read_table(small[0]), other)
    with pytest.raises(DraftmillError, match="checksum"):
        Shard(other, "bfloat16")


def test_a_missing_shard_is_refused_by_name(tmp_path):
    with pytest.raises(DraftmillError, match=r"gone\.parquet: missing"):
        Shard(tmp_path / "gone.parquet", "bfloat16")


def test_an_exception_while_writing_leaves_no_file(tmp_path):
    state = torch.zeros(2, 4)

    def interrupted() -> None:
        with new_shard(tmp_path / "a", [0], 4, "float32", RECORD) as shard:
            shard.append({}, [1, 2], [1, 1], [state, state])
            raise KeyError("interrupted")

    with pytest.raises(KeyError, match="interrupted"):
        interrupted()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ids", "state"),
    [([1, 2, 3], torch.zeros(2, 4)), ([1, 2], torch.zeros(2, 5)), ([1, 2], torch.zeros(2, 2))],
)
def test_states_of_another_shape_are_never_written(ids, state, tmp_path):
    def written() -> None:
        with new_shard(tmp_path / "a", [0], 4, "float32", RECORD) as shard:
            shard.append({}, ids, [1] * len(ids), [state, state])

    with pytest.raises(ValueError, match=r"states for|bytes, the column"):
        written()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("written", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_states_in_another_dtype_are_refused_with_both_dtypes_named(written, wanted, tmp_path):
    path = tmp_path / "states.parquet"
    write(path, [3], [1], 4, written)
    with pytest.raises(DraftmillError) as caught:
        Shard(path, wanted)
    assert f"stored hidden states ({path}) is {written}, but must be {wanted}" in str(caught.value)
