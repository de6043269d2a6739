"""What a shard holds: its tokens' ids and masks, and states that are finite."""

import torch

from draftmill.errors import DraftmillError
from draftmill.shard_reader import Shard


def check_contents(shard: Shard, rows: list[dict]) -> None:
    """Every state finite, every id and mask equal to the tokens'."""
    expected = {(row["row"], row["turn"]): row for row in rows}
    columns = shard.file.schema_arrow.names
    for index, sample in enumerate(shard.samples):
        row = expected.pop((sample["row"], sample["turn"]), None)
        found = shard.read(index, columns)
        ids, mask = found.pop("input_ids").tolist(), found.pop("loss_mask").long().tolist()
        if row is None or ids != row["input_ids"] or mask != row["loss_mask"]:
            raise DraftmillError(
                f"{shard.path}: sample {index} (row {sample['row'] + 1}) does not hold the ids and "
                "mask of its tokens; delete it and start Snakemake again."
            )
        for name, state in found.items():
            if not torch.isfinite(state).all():
                raise DraftmillError(
                    f"{shard.path}: {name} of sample {index} (row {sample['row'] + 1}) holds values "
                    "that are not finite; the target overflowed in this dtype or its weights are "
                    "damaged."
                )
    if expected:
        raise DraftmillError(f"{shard.path}: lacks {len(expected)} samples of its tokens.")
