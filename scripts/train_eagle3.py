"""Trains an EAGLE-3 drafter and exports it in speculators' format."""

from draftmill import drafter_training, eagle3


def main() -> None:
    drafter_training.train(drafter_training.parse(__doc__), eagle3)


if __name__ == "__main__":
    main()
