"""The tokenizer in a GGUF file, split as llama.cpp splits for the pre-tokenizer that its header names.

transformers converts vocabulary and merges, and takes the splitting from the model's architecture, whatever
the header says.
"""

from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftmill.errors import DraftmillError

KEY = "tokenizer.ggml.pre"
# name in the header -> its splitting. SmolLM's, in llama.cpp's src/llama-vocab.cpp: every \p{N} by itself,
# then GPT-2's pattern. Without the first step a digit keeps the last space of several to itself.
SPLITS: dict[str, PreTokenizer] = {
    "smollm": Sequence(
        [
            Digits(individual_digits=True),
            ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
}


def load(gguf: Path, proven: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF.

    proven: a golden table decides on its ids, so an unknown pre-tokenizer is left to transformers. Raises
    DraftmillError for one otherwise.
    """
    name = pre_tokenizer_of(gguf)
    if name not in SPLITS and not proven:
        raise DraftmillError(
            f"{gguf}: its header names the pre-tokenizer {name!r} ({KEY}), but only {', '.join(SPLITS)} is "
            "known here, and transformers' conversion can give silently different ids; give "
            "target.tokenizer.golden, a table by the model's own tokenizer (scripts/make_golden_table.py), "
            "or name a folder with its tokenizer.json in target.tokenizer.path."
        )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if name in SPLITS:
        tokenizer.backend_tokenizer.pre_tokenizer = SPLITS[name]
    return tokenizer


def pre_tokenizer_of(gguf: Path) -> str | None:
    """The name in the header; None where it has none."""
    from gguf import GGUFReader  # slow to import, and rarely needed

    field = GGUFReader(gguf).fields.get(KEY)
    return None if field is None else field.contents()
