"""Names on disk become the model's as transformers renames them, and large indexes take few renames."""

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.core_model_loading import rename_source_key

import families
from draftmill import checkpoint_files, checkpoint_names, target_parts
from draftmill.checkpoint_names import Conversion
from draftmill.target_structure import model_of

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import find_parts


def manifest_of(folder: Path) -> dict:
    return {"checkpoint": str(folder), "trust_remote_code": False}


@pytest.mark.parametrize("name", families.NAMES)
def test_names_by_kind_are_those_of_transformers_name_by_name(name, tmp_path):
    folder = families.make(name, tmp_path / name)
    conversion = Conversion(model_of(manifest_of(folder)))
    for key in checkpoint_files.weight_map(folder):
        target, pattern = rename_source_key(
            key, conversion.renamings, conversion.converters, conversion.prefix, conversion.state
        )
        if target not in conversion.state and key in conversion.state:
            target = key
        assert conversion.target_of(key) == (target, pattern)


def test_an_index_of_kimis_real_size_takes_few_renames(tmp_path, monkeypatch):
    """208,000 names, in files that hold nothing: each kind of name is renamed once, no tensor is touched."""
    names = find_parts.write_checkpoint(tmp_path)
    assert 200_000 < names < 220_000
    calls = []

    def counted(*arguments):
        calls.append(arguments[0])
        return rename_source_key(*arguments)

    monkeypatch.setattr(checkpoint_names, "rename_source_key", counted)
    parts = find_parts.find(tmp_path)
    assert len(calls) < 500
    assert parts.embedding == "language_model.model.embed_tokens.weight"
    assert parts.head == {
        "lm_head.weight": "language_model.lm_head.weight",
        "norm.weight": "language_model.model.norm.weight",
    }


def test_finding_needs_only_the_files_of_what_it_finds(tmp_path):
    find_parts.write_checkpoint(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        if path.name != find_parts.file_name(find_parts.FILES - 2):
            os.unlink(path)
    assert not find_parts.find(tmp_path).tied


def test_reading_the_parts_touches_no_other_tensor(tmp_path, monkeypatch):
    opened, asked = checkpoint_files.safe_open, []

    class Watched:
        """An open file of which single tensors can be asked for, and nothing else."""

        def __init__(self, path: Path, framework: str):
            self.file = opened(path, framework)

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            pass

        def get_tensor(self, name: str) -> torch.Tensor:
            asked.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(checkpoint_files, "safe_open", Watched)
    folder = families.make("qwen3", tmp_path / "qwen3")
    model = model_of(manifest_of(folder))
    parts = target_parts.find(folder, model, Conversion(model))
    assert asked == []
    found = target_parts.read(folder, parts, torch.bfloat16)
    assert sorted(asked) == sorted([parts.embedding, *parts.head.values()])
    stored = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    assert found["lm_head.weight"].equal(stored[parts.head["lm_head.weight"]])
