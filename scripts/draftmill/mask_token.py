"""The token that stands for the unknown ones of a block."""

from draftmill.errors import DraftmillError
from draftmill.target_tokenizer import tokenizer_of


def settled(named: int | None, manifest: dict) -> int:
    """The mask token that the configuration names, else the tokenizer's own, else the first embedding that no
    token uses.

    Raises DraftmillError where there is none of them.
    """
    if named is not None:
        return named
    tokenizer = tokenizer_of(manifest)
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    used = {*tokenizer.get_vocab().values(), *manifest["stop_ids"]}
    spare = next((i for i in range(manifest["vocab_size"]) if i not in used), None)
    if spare is None:
        raise DraftmillError(
            f"config: mask_token_id is not set, and the target {manifest['name']} has neither a mask token nor "
            f"an embedding without a token; name a special token that no text holds, of {unused(tokenizer)}."
        )
    return spare


def unused(tokenizer) -> str:
    """Special tokens that may serve, as text."""
    named = {*map(str, tokenizer.special_tokens_map.values())}
    added = [f"{i} ({t.content})" for i, t in sorted(tokenizer.added_tokens_decoder.items())]
    return (
        ", ".join(a for a in added if a.split(" (")[1][:-1] not in named)[:200] or "no such token"
    )
