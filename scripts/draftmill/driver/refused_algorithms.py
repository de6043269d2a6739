"""Algorithms that speculators offers and this workflow does not: what cannot be audited, or measured exactly,
is refused before anything else is said of a drafter."""

from draftmill.errors import DraftmillError

REASONS = {
    "peagle": (
        "draws what it trains over a whole packed row, so that a conversation's share depends on what is packed "
        "beside it, and returns no logits that an audit or a measurement could read; use eagle3, or dflash to draft "
        "in parallel"
    ),
    "mtp": (
        "goes on training the target's own multi-token prediction layers, which most checkpoints lack and "
        "transformers does not load, and against the text's tokens, not the target's distribution; use eagle3"
    ),
    "xpress": (
        "drafts by passes over a block whose number the serving engine chooses, so no one tau belongs to its files, "
        "and trains on drafts of its own, which the audit's reference cannot know; use dspark or dflash2"
    ),
}


def refuse(config: dict) -> None:
    """Raises DraftmillError for the first drafter with such an algorithm. config: as written, not validated."""
    drafters = config.get("drafters")
    for name, drafter in drafters.items() if isinstance(drafters, dict) else ():
        algorithm = drafter.get("algorithm") if isinstance(drafter, dict) else None
        reason = REASONS.get(algorithm) if isinstance(algorithm, str) else None
        if reason:
            raise DraftmillError(
                f"config: 'drafters.{name}.algorithm' is {algorithm}, which {reason}."
            )
