"""The files of a foreign drafter: their layouts, damage, and where they come from."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import import_drafter
from draftmill import eagle3
from draftmill.errors import DraftmillError
from foreign_checkpoints import (
    LAYERS,
    Checkpoint,
    Target,
    eagle3_checkpoint,
    written,
)


@pytest.fixture
def target(foreign_target) -> Target:
    return foreign_target


@pytest.fixture
def made(target, tmp_path) -> Callable[..., Path]:
    """(change, layout of the files, options of the builder) -> the folder of a checkpoint."""
    return partial(written, eagle3_checkpoint, target, tmp_path / "published")


@pytest.mark.parametrize("kind", ["shards", "pickle", "pickles"])
def test_the_layout_of_the_files_changes_no_byte(target, made, tmp_path, kind):
    one = target.imported("eagle3", made())
    config = json.loads((tmp_path / "published/config.json").read_text())
    tensors = load_file(tmp_path / "published/model.safetensors")
    other = target.imported("eagle3", Checkpoint(config, tensors).write(tmp_path / kind, kind))
    for name in ("config.json", "model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


class Code:
    """What a pickle may carry beside tensors."""


def test_a_pickle_with_code_is_refused_unread(target, made):
    folder = made(kind="pickle")
    torch.save({"fc.weight": Code()}, folder / "pytorch_model.bin")
    with pytest.raises(DraftmillError, match="holds Python objects beside tensors"):
        target.imported("eagle3", folder)


@pytest.mark.parametrize(
    ("kind", "file", "sentence"),
    [
        ("safetensors", "model.safetensors", r"model\.safetensors: damaged"),
        ("pickle", "pytorch_model.bin", r"pytorch_model\.bin: "),
        ("shards", "model.safetensors.index.json", r"index\.json: damaged"),
        ("pickles", "pytorch_model.bin.index.json", r"index\.json: damaged"),
        ("safetensors", "config.json", r"config\.json: damaged"),
    ],
)
def test_a_file_that_was_cut_short_is_named(target, made, kind, file, sentence):
    folder = made(kind=kind)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(DraftmillError, match=sentence):
        target.imported("eagle3", folder)


@pytest.mark.parametrize("kind", ["shards", "pickles"])
def test_a_missing_shard_is_named(target, made, kind):
    folder = made(kind=kind)
    shard = sorted(folder.glob("*-00002-*"))[0]
    shard.unlink()
    with pytest.raises(DraftmillError, match=f"{shard.name}: is missing, but"):
        target.imported("eagle3", folder)


def test_a_folder_without_weights_is_refused(target, made):
    folder = made()
    (folder / "model.safetensors").unlink()
    with pytest.raises(DraftmillError, match="holds no weights, expected"):
        target.imported("eagle3", folder)


def test_a_drafter_on_the_hub_is_read_from_its_snapshot(target, made, monkeypatch, tmp_path):
    folder, asked = made(), []

    def snapshot(name: str, revision: str, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(folder)

    monkeypatch.setattr("draftmill.foreign_files.snapshot_download", snapshot)
    stage = target.stage("eagle3", folder, LAYERS)
    stage.config.update(path=None, hub="someone/drafter", revision="c" * 40)
    import_drafter.import_checkpoint(stage, target.path, target.head, tmp_path / "out")
    assert asked == [("someone/drafter", "c" * 40)]
    run = json.loads((tmp_path / "out/run.json").read_text())
    assert run["imported"]["hub"] == "someone/drafter"
    eagle3.load(tmp_path / "out", "cpu")


def test_a_drafter_for_a_target_of_another_fingerprint_is_refused(target, made):
    stage = target.stage("eagle3", made(), LAYERS)
    stage.inputs["target"] = "0" * 16
    with pytest.raises(DraftmillError, match="carries the fingerprint"):
        import_drafter.import_checkpoint(stage, target.path, target.head, target.path.parent)
