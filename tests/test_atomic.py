"""Files appear whole or not at all."""

import errno
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill import atomic, tables
from draftmill.atomic import atomic_path, sha256_of, write_json, write_text
from draftmill.errors import DraftmillError


def interrupted(path: Path, error: BaseException) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        raise error


def test_a_file_appears_only_when_the_block_ends(tmp_path):
    path = tmp_path / "a" / "b.txt"
    with atomic_path(path) as temporary:
        temporary.write_text("whole")
        assert temporary.parent == path.parent
        assert not path.exists()
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "error", [ValueError("x"), OSError(errno.EIO, "x"), KeyboardInterrupt(), SystemExit(143)]
)
def test_an_exception_leaves_nothing_and_is_passed_on(error, tmp_path):
    with pytest.raises(type(error)) as caught:
        interrupted(tmp_path / "a", error)
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


def test_an_exception_keeps_what_stood_under_the_name(tmp_path):
    path = tmp_path / "a"
    write_text(path, "old")
    with pytest.raises(ValueError, match="x"):
        interrupted(path, ValueError("x"))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_exception_before_the_first_byte_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "a"):
        pass  # nothing was written, so there is nothing to rename
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["replace", "fsync", "open"])
def test_a_full_disk_becomes_a_sentence_that_names_the_file(call, number, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "result.json"
    write_text(path, "old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(DraftmillError) as caught:
        write_text(path, "new")
    assert str(caught.value).startswith(f"{path}: no space left")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("kind", ["text", "table"])
def test_a_disk_that_is_really_full_becomes_the_same_sentence(kind, tmp_path):
    path = tmp_path / "result.parquet"
    os.symlink("/dev/full", path.with_name(f".{path.name}.{os.getpid()}.tmp"))
    rows = [{"a": i} for i in range(9999)]
    write = {
        "text": lambda: write_text(path, "text"),
        "table": lambda: tables.write(path, rows, pa.schema([("a", pa.int64())]), {}),
    }[kind]
    with pytest.raises(DraftmillError, match=r"result\.parquet: no space left"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_another_error_of_the_disk_is_not_called_full(tmp_path, monkeypatch):
    def denied(*args):
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(PermissionError):
        write_text(tmp_path / "a", "text")
    assert list(tmp_path.iterdir()) == []


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    calls = []
    replace = os.replace
    monkeypatch.setattr(atomic, "fsync", lambda path: calls.append(("fsync", path.suffix)))
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append("replace") or replace(a, b))
    write_text(tmp_path / "a", "text")
    assert calls == [("fsync", ".tmp"), "replace", ("fsync", tmp_path.suffix)]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=10,
)


def backwards(value: object) -> object:
    """The same value with every dictionary in the opposite order."""
    if isinstance(value, dict):
        return {key: backwards(value[key]) for key in reversed(value)}
    return [backwards(item) for item in value] if isinstance(value, list) else value


@given(values)
def test_equal_values_give_equal_bytes_that_read_back(value):
    texts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic, "write_text", lambda path, text: texts.append(text))
        write_json("unused", value)
        write_json("unused", backwards(value))
    assert texts[0] == texts[1]
    assert json.loads(texts[0]) == value


def test_the_same_value_written_twice_is_the_same_file(tmp_path):
    for name in ("a", "b"):
        write_json(tmp_path / name, {"b": 1, "a": ["ü", 0.1]})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes().endswith(b"}\n")
    assert sha256_of(tmp_path / "a") == sha256_of(tmp_path / "b")


def test_the_digest_is_that_of_the_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_of(tmp_path / "a").startswith("ba7816bf8f01cfea414140de5dae2223")
