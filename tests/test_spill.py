"""Tensors put aside on disk come back as they were, or the run stops with a sentence."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftmill.errors import DraftmillError
from draftmill.spill import Spill


def put_in(monkeypatch, path: str | Path, mode: str) -> None:
    """Tensors are put into the file at `path` from now on."""
    file = open(path, mode)  # noqa: SIM115 (the spill's own)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: file)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans()), max_size=8))
def test_spilled_tensors_come_back_bit_for_bit(shapes):
    generator = torch.Generator().manual_seed(0)
    spill = Spill(Path("."))
    tensors = [
        torch.randn(1, rows, columns, generator=generator).to(
            torch.bfloat16 if half else torch.float32
        )
        for rows, columns, half in shapes
    ]
    places = [spill.put(tensor) for tensor in tensors]
    for tensor, place in reversed(list(zip(tensors, places, strict=True))):
        assert torch.equal(spill.get(place), tensor)
    spill.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("values", [3, 100_000])  # less and more than a file's buffer
def test_a_full_disk_is_one_sentence_that_names_the_folder(values, tmp_path, monkeypatch):
    put_in(monkeypatch, "/dev/full", "r+b")
    spill = Spill(tmp_path)
    with pytest.raises(DraftmillError) as caught:
        spill.put(torch.zeros(values))
    assert str(caught.value).startswith(f"{tmp_path}: no space left on the device")
    assert "\n" not in str(caught.value)


def test_another_fault_of_the_disk_is_no_full_disk(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.touch()
    put_in(monkeypatch, path, "rb")
    with pytest.raises(OSError, match="write"):
        Spill(tmp_path).put(torch.zeros(3))


def test_a_tensor_that_does_not_come_back_whole_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "file"
    put_in(monkeypatch, path, "w+b")
    spill = Spill(tmp_path)
    first, second = spill.put(torch.ones(4)), spill.put(torch.ones(5000))
    with open(path, "r+b") as file:
        file.truncate(16 + 100)
    assert torch.equal(spill.get(first), torch.ones(4))
    with pytest.raises(DraftmillError, match="100 bytes came back, expected 20,000") as caught:
        spill.get(second)
    assert str(caught.value).startswith(f"{tmp_path}: ")
