"""Trains a DFlash drafter and exports it in speculators' format."""

from draftmill import dflash, drafter_training


def main() -> None:
    drafter_training.train(drafter_training.parse(__doc__), dflash)


if __name__ == "__main__":
    main()
