"""Golden tables: ids that the model's own tokenizer gave for texts on which converters go wrong.

JSON Lines of {"text": ..., "ids": [...]}, made by scripts/make_golden_table.py.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftmill.errors import DraftmillError

PROBES = Path(__file__).resolve().parents[2] / "resources" / "tokenizer_probes.jsonl"
MAKE = "make it with scripts/make_golden_table.py where the model's own tokenizer runs"
SHOWN = 80  # characters of a text in a message

Rows = list[tuple[str, list[int]]]


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def read_probes(path: Path = PROBES) -> dict[str, str]:
    """text -> category of every probe."""
    found = {}
    for number, value in numbered_lines(path):
        text, category = value.get("text"), value.get("category")
        if not is_text(text) or not is_text(category):
            raise malformed(path, number, "a probe needs a 'text' and a 'category'")
        found[text] = category
    return found


def read(path: Path) -> Rows:
    """The texts of a table and their ids, in order.

    Raises DraftmillError for an empty table, a malformed line (by number), two different lists of ids for
    one text, or a table that lacks a category of the probes.
    """
    found: dict[str, list[int]] = {}
    for number, value in numbered_lines(path):
        text, ids = value.get("text"), value.get("ids")
        if not is_text(text):
            raise malformed(path, number, "'text' is no text of at least one character")
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise malformed(path, number, "'ids' is no list of token ids")
        if found.setdefault(text, ids) != ids:
            raise malformed(path, number, f"gives {shown(text)} other ids than a line before it")
    if not found:
        raise DraftmillError(f"{path}: the golden table is empty; {MAKE}.")
    check_coverage(path, found)
    return list(found.items())


def numbered_lines(path: Path) -> Iterable[tuple[int, dict]]:
    """Line number, from 1, and the object on it; split at line feeds alone, since texts may hold others."""
    for number, line in enumerate(path.read_bytes().rstrip(b"\r\n").split(b"\n"), 1):
        if not line and number == 1:
            return  # an empty file
        try:
            value = json.loads(line)
        except ValueError as error:
            raise malformed(path, number, f"is no JSON: {error}") from None
        if not isinstance(value, dict):
            raise malformed(path, number, "is no JSON object")
        yield number, value


def is_text(value: object) -> bool:
    """Text that UTF-8 can carry; JSON's escapes can spell half a surrogate pair."""
    if not isinstance(value, str) or not value:
        return False
    return value.encode("utf-8", "replace").decode() == value


def malformed(path: Path, number: int, reason: str) -> DraftmillError:
    return DraftmillError(f"{path}: line {number}: {reason}; correct the line, or {MAKE}.")


def check_coverage(path: Path, texts: Iterable[str]) -> None:
    """Plain English alone would agree with almost any converter: every category must be there."""
    categories = read_probes()
    missing = {*categories.values()} - {categories[text] for text in texts if text in categories}
    if missing:
        raise DraftmillError(
            f"{path}: the golden table has no probe of {', '.join(sorted(missing))} "
            f"({PROBES.name} lists them); without them a wrong tokenizer can pass; {MAKE}."
        )


def check(tokenizer: PreTrainedTokenizerBase, path: Path) -> int:
    """Compares the tokenizer with a table; the number of texts, all with equal ids.

    Raises DraftmillError that names the first difference and what it is typical of.
    """
    rows = read(path)
    found = difference(tokenizer, rows)
    if found:
        raise DraftmillError(
            f"{path}: {type(tokenizer).__name__} of {tokenizer.name_or_path} differs from the golden "
            f"table in {found}"
        )
    return len(rows)


def difference(tokenizer: PreTrainedTokenizerBase, rows: Rows) -> str | None:
    """The first difference in words, ending in a hint; None where all ids are equal."""
    wrong = [(text, ids, ids_of(tokenizer, text)) for text, ids in rows]
    wrong = [(text, ids, found) for text, ids, found in wrong if ids != found]
    if not wrong:
        return None
    text, ids, found = wrong[0]
    pairs = zip(ids, found, strict=False)  # one may be the beginning of the other
    ends = min(len(ids), len(found))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), ends)
    return (
        f"{len(wrong)} of {len(rows)} texts, first in {shown(text)} at token {position}: expected "
        f"{named(tokenizer, ids[position:][:3])}, found {named(tokenizer, found[position:][:3])}; "
        f"{hint([text for text, _, _ in wrong], len(rows))}."
    )


def named(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Ids with their text; a table of another model may hold ids that this tokenizer lacks."""
    known = {*tokenizer.get_vocab().values()}
    pieces = [
        f"{i} ({tokenizer.decode([i])!r})" if i in known else f"{i} (no token here)" for i in ids
    ]
    return " ".join(pieces) or "the end"


def shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")


def hint(texts: list[str], total: int) -> str:
    """What such a difference usually comes from, and what to do."""
    categories = read_probes()
    found = {categories.get(text, "own text") for text in texts}
    if len(texts) > total / 2:
        return (
            "so many differences mean the wrong tokenizer: compare target.tokenizer with the folder or "
            "revision that the table was made from"
        )
    if found <= {"special tokens"}:
        return (
            "only special tokens written in text differ: the added tokens are those of another revision; "
            "pin the revision that the table was made from"
        )
    return (
        f"({', '.join(sorted(found))}) typical of a converter whose splitting pattern is not the model's "
        "own, or of another revision: let the tokenizer's own code run "
        "(target.tokenizer.trust_remote_code), or name a folder with its true tokenizer.json in "
        "target.tokenizer.path"
    )
