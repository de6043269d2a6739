"""Trains a DFlash2 drafter and exports it in speculators' format."""

from draftmill import dflash2, drafter_training


def main() -> None:
    drafter_training.train(drafter_training.parse(__doc__), dflash2)


if __name__ == "__main__":
    main()
