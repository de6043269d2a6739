"""The packs that an audit looks at, with what it knows of them from the raw samples alone."""

from dataclasses import dataclass, replace

import torch

from draftmill import packing
from draftmill.state_dataset import StateDataset
from draftmill.trainer import Trainer

LOOKED_AT = 64  # samples among which documents of a small pack are chosen
DOCUMENTS = 3
SHORTEST = 8  # supervised tokens that a document of a small pack should have
GAP = 9  # tokens between those that are no answer's, in an invented loss mask
AROUND = 128  # tokens on either side of an answer's start that a document of a small pack keeps


@dataclass(frozen=True)
class Document:
    """Where a sample stands in a pack: its first row, its rows, and the tokens that those rows come from."""

    first: int
    rows: int
    tokens: int


@dataclass(frozen=True)
class Pack:
    """Raw samples side by side. draws: what each one's random choices depend on."""

    samples: list[dict[str, torch.Tensor]]
    draws: list[str]
    documents: list[Document]
    limit: int

    def batch(self, trainer: Trainer, samples=None) -> dict[str, torch.Tensor]:
        """As the trainer prepares and packs them; `samples` takes the place of the pack's own."""
        samples = self.samples if samples is None else samples
        pairs = zip(samples, self.draws, strict=True)
        return packing.pack([trainer.prepare(s, d) for s, d in pairs], self.limit)

    def alone(self, number: int) -> "Pack":
        """One of its documents in a pack of its own."""
        document = self.documents[number]
        moved = Document(0, document.rows, document.tokens)
        return Pack([self.samples[number]], [self.draws[number]], [moved], document.rows)

    def places(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Document and row in it of each of `size` packed rows, int64; document -1 is padding."""
        document, row = torch.full((size,), -1), torch.full((size,), -1)
        for number, d in enumerate(self.documents):
            document[d.first : d.first + d.rows] = number
            row[d.first : d.first + d.rows] = torch.arange(d.rows)
        return document, row


def of(samples: list[dict], draws: list[str], length, limit: int) -> Pack:
    """length: tokens of a sample -> its rows; a sample with more rows than `limit` is cut."""
    documents, first = [], 0
    for sample in samples:
        tokens = len(sample["input_ids"])
        rows = min(length(tokens), limit)
        documents.append(Document(first, rows, rows + tokens - length(tokens)))
        first += rows
    return Pack(samples, draws, documents, limit)


def first_of(trainer: Trainer, data: StateDataset, number: int, epoch: int = 0) -> Pack:
    """The pack of this number of an epoch, as training will meet it."""
    settings = trainer.settings
    seed, limit = settings["seed"], settings["tokens_per_batch"]
    lengths = [trainer.length(data.about(i)["tokens"]) for i in range(len(data))]
    order = packing.epoch_order(len(data), seed, epoch)
    groups = list(packing.packs(order, lengths, limit))
    group = groups[number % len(groups)]
    return of(
        [data[i] for i in group], [f"{seed}/{epoch}/{i}" for i in group], trainer.length, limit
    )


def small(trainer: Trainer, data: StateDataset) -> Pack:
    """The shortest documents that train something, together; one of them twice where there are too few."""
    order = packing.epoch_order(len(data), trainer.settings["seed"], 0)[:LOOKED_AT]
    sizes = {i: data.about(i)["tokens"] - data.about(i)["start"] for i in order}
    enough = [i for i in order if sizes[i] >= SHORTEST] or [max(order, key=sizes.__getitem__)]
    chosen = sorted(enough, key=lambda i: data.about(i)["tokens"])[:DOCUMENTS]
    chosen = (chosen * DOCUMENTS)[:DOCUMENTS]
    samples = [around(data[i], data.about(i)["start"]) for i in chosen]
    rows = sum(trainer.length(len(sample["input_ids"])) for sample in samples)
    draws = [f"audit/{n}/{i}" for n, i in enumerate(chosen)]
    return of(samples, draws, trainer.length, rows)


def around(sample: dict[str, torch.Tensor], start: int) -> dict[str, torch.Tensor]:
    """The part of a sample around its answer's start: a short conversation of its own."""
    part = slice(max(0, start - AROUND), start + AROUND)
    return {name: value[part] for name, value in sample.items()}


def with_edges(pack: Pack) -> Pack:
    """The pack as if answers stood everywhere: up to the borders of documents, with gaps between them."""
    return replace(pack, samples=[s | {"loss_mask": gapped(s["loss_mask"])} for s in pack.samples])


def gapped(mask: torch.Tensor) -> torch.Tensor:
    made = torch.arange(len(mask)) % GAP != GAP // 2
    made[:GAP] = made[-GAP:] = True
    return made


def longest(trainer: Trainer, data: StateDataset) -> Pack:
    """The longest training sample, as long as a batch lets it be."""
    limit = trainer.settings["tokens_per_batch"]
    index = max(range(len(data)), key=lambda i: data.about(i)["tokens"])
    rows = min(limit, trainer.length(data.about(index)["tokens"]))
    return of([data[index]], [f"audit/{index}"], trainer.length, rows)
