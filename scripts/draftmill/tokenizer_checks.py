"""Whether a tokenizer is the target's: refused before anything is tokenized with it."""

import re
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from draftmill import golden_table, target_tokenizer, tokenizer_files
from draftmill.atomic import sha256_of
from draftmill.errors import DraftmillError

# <|im_start|>, DeepSeek's full-width bars, <start_of_turn>: what templates write as control tokens
MARKER = re.compile(r"<\|[^|<>\s{}']+\|>|<｜[^｜<>\s]+｜>|<\w+_of_\w+>")


def checked(
    manifest: dict, settings: dict, golden: Path | None
) -> tuple[PreTrainedTokenizerBase, bool]:
    """The target's tokenizer, loaded and compared with the golden table, else with its own tokenizer.json, and
    whether that file has to be taken as it is.

    `settings` is the plan's slice of the tokenizer. Raises DraftmillError where files are not those that were
    planned with, where transformers would convert a tokenizer that has no table, or where ids differ.
    """
    source = manifest["tokenizer_source"]
    if golden and sha256_of(golden) != settings["golden"]:
        raise changed(golden)
    if settings["path"] and tokenizer_files.folder_digest(source["folder"]) != settings["digest"]:
        raise changed(source["folder"])
    if not golden:
        refuse_conversion(source["folder"], source["trust_remote_code"])
    tokenizer, as_file = target_tokenizer.tokenizer_of(manifest), False
    if not golden and difference_from_file(tokenizer, source):
        kind, as_file = type(tokenizer).__name__, True
        tokenizer = target_tokenizer.tokenizer_of(
            manifest | {"tokenizer_source": source | {"as_file": True}}
        )
        check_own_file(tokenizer, source)
        print(
            f"tokenizer: transformers' {kind} splits text otherwise than tokenizer.json says; the file is "
            "taken as it is (target.tokenizer.golden would decide)",
            flush=True,
        )
    if golden:
        count = golden_table.check(tokenizer, golden)
        print(f"tokenizer: {count} texts have the ids of {golden}", flush=True)
    return tokenizer, as_file


def changed(path: str | Path) -> DraftmillError:
    return DraftmillError(
        f"{path}: changed after this run was planned; start Snakemake again, so that it plans with the "
        "tokenizer as it is now."
    )


def refuse_conversion(folder: str, trust_remote_code: bool) -> None:
    """Raises DraftmillError for a tokenizer that transformers has to convert."""
    if not tokenizer_files.is_converted(folder, trust_remote_code):
        return
    names = ", ".join(p.name for p in tokenizer_files.tokenizer_files(folder, code=False))
    own = tokenizer_files.own_code(folder)
    code = (
        own
        and f", or let its own code ({own[-1]}) run with target.tokenizer.trust_remote_code: true"
    )
    raise DraftmillError(
        f"{folder}: the tokenizer has no tokenizer.json (found: {names or 'nothing'}), so transformers "
        "converts it, and a converter can give silently different ids; give target.tokenizer.golden, a "
        f"table by the model's own tokenizer (scripts/make_golden_table.py){code or ''}."
    )


def difference_from_file(tokenizer: PreTrainedTokenizerBase, source: dict) -> str | None:
    """Where the probes' ids differ from what tokenizer.json itself gives: for some classes transformers keeps
    its vocabulary only, and splits text by a pattern of the class. None where they do not."""
    folder = source["folder"]
    if source["trust_remote_code"] and tokenizer_files.own_code(folder):
        return None  # its own code is the authority, not a file beside it
    own = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    own.no_truncation()
    own.no_padding()
    known = own.get_added_tokens_decoder()
    for index, token in sorted(tokenizer.added_tokens_decoder.items()):
        if index not in known:  # added by tokenizer_config.json
            own.add_tokens([token])
    rows = [
        (text, own.encode(text, add_special_tokens=False).ids)
        for text in golden_table.read_probes()
    ]
    return golden_table.difference(tokenizer, rows)


def check_own_file(tokenizer: PreTrainedTokenizerBase, source: dict) -> None:
    """Raises DraftmillError where the tokenizer does not tokenize as its tokenizer.json says."""
    found = difference_from_file(tokenizer, source)
    if found:
        raise DraftmillError(
            f"{source['folder']}/tokenizer.json: transformers builds a {type(tokenizer).__name__} that does "
            f"not tokenize as this file says; ids differ in {found} target.tokenizer.golden decides where "
            "the file is wrong."
        )


def check_fits(tokenizer: PreTrainedTokenizerBase, stop_ids: list[int], rows: int) -> None:
    """Refuses another model's tokenizer: an id without a row of the embedding, [rows, hidden size], or a
    stop id that is an ordinary piece of text.

    Raises DraftmillError that shows the piece.
    """
    pieces = {index: piece for piece, index in tokenizer.get_vocab().items()}
    added = {int(i): str(token) for i, token in tokenizer.added_tokens_decoder.items()}
    mend = "name the folder or hub revision of its own in target.tokenizer"
    # added tokens may lie beyond (Gemma 3's image token does in its text-only models); text that holds one
    # is refused when it is tokenized
    beyond = sorted(i for i in pieces if i >= rows and i not in added)
    pieces |= added
    if beyond:
        raise DraftmillError(
            f"{tokenizer.name_or_path}: {len(beyond)} tokens of the tokenizer, {beyond[0]} "
            f"({pieces[beyond[0]]!r}) first, have no row among the target's {rows} embeddings, so this is "
            f"another model's tokenizer; {mend}, or a copy without tokens that the model never had."
        )
    special = added.keys() | {*tokenizer.all_special_ids}
    for index in stop_ids:
        if index not in special:
            piece = repr(pieces[index]) if index in pieces else "no token"
            raise DraftmillError(
                f"{tokenizer.name_or_path}: the target ends its answers with token {index}, which in this "
                f"tokenizer is {piece}, not a special or added token, so this is another model's "
                f"tokenizer; {mend}."
            )


def unknown_markers(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The chat template's markers, such as <|im_start|>, that the tokenizer cuts into several tokens.

    Some templates write markers that are plain text to their model, so this is no error by itself.
    """
    found = {*MARKER.findall(str(tokenizer.chat_template or ""))}
    return sorted(m for m in found if len(golden_table.ids_of(tokenizer, m)) != 1)
