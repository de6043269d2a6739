"""Prints the number of rows of a hub data set's split, or of a folder written by save_to_disk: what
`rows` of a hub source needs."""

import argparse
from pathlib import Path

import datasets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("id", help="id of the data set, or folder")
    parser.add_argument("--subset")
    parser.add_argument("--split", default="train")
    parser.add_argument("--revision")
    options = parser.parse_args()
    if Path(options.id).is_dir():
        data = datasets.load_from_disk(options.id)
        print(len(data[options.split] if isinstance(data, datasets.DatasetDict) else data))
        return
    builder = datasets.load_dataset_builder(options.id, options.subset, revision=options.revision)
    print(builder.info.splits[options.split].num_examples)


if __name__ == "__main__":
    main()
