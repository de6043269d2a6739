"""Checkpoints made wrong by design: a copy of a tiny one, with some of its tensors or keys changed."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import families
from draftmill import checkpoint_files, tensor_files
from draftmill.errors import DraftmillError
from mini_road import MiniRoad, write_data
from workflow import rows, tiny_config

Tensors = dict[str, torch.Tensor]


class Edited:
    """A checkpoint's folder that a test may change."""

    def __init__(self, original: Path, folder: Path):
        self.folder = folder
        shutil.copytree(original, folder)

    @property
    def index(self) -> Path:
        return self.folder / checkpoint_files.INDEX

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    def tensors(self, change: Callable[[Tensors], None]) -> "Edited":
        """Writes the tensors anew, with their index, after `change`."""
        found = families.tensors_of(self.folder)
        for file in self.files():
            file.unlink()
        change(found)
        families.write_shards(found, self.folder)
        return self

    def without(self, pattern: str) -> "Edited":
        """Takes out the tensors whose names match, of which there is at least one."""

        def drop(tensors: Tensors) -> None:
            names = [name for name in tensors if re.search(pattern, name)]
            assert names, f"no tensor matches {pattern}"
            for name in names:
                del tensors[name]

        return self.tensors(drop)

    def config(self, change: Callable[[dict], None]) -> "Edited":
        path = self.folder / "config.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        change(found)
        path.write_text(json.dumps(found), encoding="utf-8")
        return self

    def road(self, **target) -> MiniRoad:
        """The tiny road for it, planned."""
        write_data(rows(2), rows(2, 500), rows(4, 600))
        config = tiny_config(self.folder)
        config["target"] |= target
        return MiniRoad(config)

    def head(self, road: MiniRoad) -> Tensors:
        return tensor_files.read(road.head)[0]

    def refused(self, **target) -> str:
        """The one sentence with which planning or preparing the target ends."""
        checkpoint_files.weight_map.cache_clear()
        checkpoint_files.header.cache_clear()
        with pytest.raises(DraftmillError) as caught:
            self.road(**target).prepare_target()
        sentence = str(caught.value)
        assert "\n" not in sentence
        assert not Path("results/tiny/target/manifest.json").exists()
        return sentence
