"""The samples behind one or more manifests, read on demand."""

from collections import OrderedDict
from pathlib import Path

import torch

from draftmill import shard_layout
from draftmill.atomic import read_json
from draftmill.errors import DraftmillError
from draftmill.shard_reader import Shard

RENDERING = ("tokenizer", "chat_template", "chat_template_kwargs")
OPEN_SHARDS = 64  # footers kept in memory


class StateDataset:
    """Samples of several sources by index.

    layers: output_of of the states that are read, all of the capture's or some.
    Raises DraftmillError where a shard is not the one that its manifest lists.
    """

    def __init__(self, manifests: list[Path], dtype: str, layers: list[int]):
        self.dtype, self.layers = dtype, layers
        self._open: OrderedDict[Path, Shard] = OrderedDict()
        self.places: list[tuple[Path, str, int]] = []  # shard file, its fingerprint, sample in it
        self.fingerprints = []
        self.rendering = None
        for path in manifests:
            manifest = read_json(path)
            self.fingerprints.append(manifest["fingerprint"])
            stored = manifest["layers"]["output_of"]
            if not set(layers) <= set(stored):
                raise DraftmillError(
                    f"{path}: holds output_of {stored}, but the drafter reads {layers}; extract those too."
                )
            rendering = {key: manifest[key] for key in RENDERING}
            if self.rendering not in (None, rendering):
                raise DraftmillError(
                    f"{path}: its prompts were rendered with {rendering}, those of {manifests[0]} with "
                    f"{self.rendering}; training and evaluation must agree."
                )
            self.rendering = rendering
            for entry in manifest["shards"]:
                where = (path.parent / entry["file"], entry["fingerprint"])
                self.places += [(*where, i) for i in range(entry["samples"])]

    def __len__(self) -> int:
        return len(self.places)

    def _shard(self, path: Path, fingerprint: str) -> Shard:
        if path not in self._open:
            shard = Shard(path, self.dtype)
            if shard.fingerprint != fingerprint:
                raise DraftmillError(
                    f"{path}: carries the fingerprint {shard.fingerprint}, but its manifest lists "
                    f"{fingerprint}; start Snakemake again."
                )
            self._open[path] = shard
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        return self._open[path]

    def about(self, index: int) -> dict:
        """row, turn, category, start and tokens of a sample."""
        path, fingerprint, place = self.places[index]
        return self._shard(path, fingerprint).samples[place]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """input_ids int64 [tokens], loss_mask bool [tokens], aux [tokens, layers * hidden], and last
        [tokens, hidden] in the declared dtype."""
        names = [shard_layout.column_of(layer) for layer in self.layers]
        found = self.columns(index, ["input_ids", "loss_mask", *names, shard_layout.LAST])
        aux = torch.cat([found.pop(name) for name in names], dim=-1)
        return found | {"aux": aux}

    def columns(self, index: int, names: list[str]) -> dict[str, torch.Tensor]:
        """Columns of a sample's shard, as Shard.read gives them."""
        path, fingerprint, place = self.places[index]
        return self._shard(path, fingerprint).read(place, names)
