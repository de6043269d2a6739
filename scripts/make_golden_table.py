"""The golden table of a tokenizer: ids of the probes, by the model's own tokenizer.

    python scripts/make_golden_table.py --tokenizer FOLDER_OR_HUB_ID [--revision COMMIT] --output FILE

Run it where the model's own tokenizer runs (its tokenizer.json, or its own code with
--trust-remote-code), then name FILE in target.tokenizer.golden.
"""

import argparse
import json
import re
import sys
import unicodedata
from pathlib import Path

from draftmill import golden_table, target_tokenizer, tokenizer_checks, tokenizer_files
from draftmill.atomic import write_text
from draftmill.errors import DraftmillError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True, help="a folder, or the id of a repository")
    parser.add_argument("--revision", help="commit of the repository, 40 hexadecimal digits")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--probes", type=Path, default=golden_table.PROBES)
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    try:
        make(
            options.tokenizer,
            options.revision,
            options.trust_remote_code,
            options.probes,
            options.output,
        )
    except DraftmillError as error:
        sys.exit(str(error))


def make(name: str, revision: str | None, trust: bool, probes: Path, output: Path) -> None:
    """Writes the table of a folder's or a repository's tokenizer.

    Raises DraftmillError where the ids would be a converter's, or do not decode to their text.
    """
    folder = Path(name).is_dir()
    if not folder and not re.fullmatch("[0-9a-f]{40}", revision or ""):
        raise DraftmillError(
            f"--tokenizer {name}: is no folder, and as a repository it needs --revision, a commit of 40 "
            "hexadecimal digits; its ids could change otherwise."
        )
    settings = {
        "path": name if folder else None,
        "hub": None if folder else name,
        "revision": revision,
        "trust_remote_code": trust,
    }
    source = target_tokenizer.source_of(settings, name)
    if tokenizer_files.is_converted(**source):
        raise DraftmillError(
            f"{name}: has no tokenizer.json, so transformers would convert it, and a converter's table proves "
            "nothing; pass --trust-remote-code where its own code may run, or use the original library."
        )
    tokenizer = target_tokenizer.load(**source)
    if tokenizer_checks.difference_from_file(tokenizer, source):
        tokenizer = target_tokenizer.load(**source, as_file=True)
    tokenizer_checks.check_own_file(tokenizer, source)
    rows = [
        (text, golden_table.ids_of(tokenizer, text)) for text in golden_table.read_probes(probes)
    ]
    inexact = round_trips(tokenizer, rows)
    lines = [json.dumps({"text": t, "ids": ids}) + "\n" for t, ids in rows]
    write_text(output, "".join(lines))
    print(f"{output}: {len(rows)} texts by {type(tokenizer).__module__}.{type(tokenizer).__name__}")
    for text in inexact:
        print(
            f"  normalised by the tokenizer, does not decode to itself: {golden_table.shown(text)}"
        )


def round_trips(tokenizer, rows: golden_table.Rows) -> list[str]:
    """The texts that do not decode to themselves, though to the same text under Unicode normalisation and
    but for white space.

    Raises DraftmillError for a text that is lost: a tokenizer that serves a model loses none.
    """
    inexact = []
    for text, ids in rows:
        found = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if found == text:
            continue
        if bare(found) != bare(text):
            raise DraftmillError(
                f"{tokenizer.name_or_path}: {golden_table.shown(text)} decodes to "
                f"{golden_table.shown(found)}; this tokenizer loses text, so it is not the model's own; "
                "no table was written."
            )
        inexact.append(text)
    return inexact


def bare(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


if __name__ == "__main__":
    main()
