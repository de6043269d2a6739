"""How much a text repeats itself: repetitive text inflates tau, so the share stands beside it."""


def repeated_share(texts: list[list[int]], n: int) -> float | None:
    """The share of n-grams that stood earlier in the same text, over all texts; None without any."""
    repeated = total = 0
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else None
