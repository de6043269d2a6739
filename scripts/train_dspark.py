"""Trains a DSpark drafter and exports it in speculators' format."""

from draftmill import drafter_training, dspark


def main() -> None:
    drafter_training.train(drafter_training.parse(__doc__), dspark)


if __name__ == "__main__":
    main()
