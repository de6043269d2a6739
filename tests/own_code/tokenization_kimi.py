"""A tokenizer's own code as it comes with Kimi-K2.5: tiktoken behind transformers' interface."""

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

OTHER_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
OTHER_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{OTHER_UPPER}*{OTHER_LOWER}+{ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{OTHER_UPPER}+{OTHER_LOWER}*{ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SPECIAL = 12  # tokens after the ranks of tiktoken.model


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        ranks = load_tiktoken_bpe(vocab_file)
        named = {index: str(token) for index, token in (added_tokens_decoder or {}).items()}
        ids = range(len(ranks), len(ranks) + SPECIAL)
        special = {named.get(i, f"<|reserved_token_{i}|>"): i for i in ids}
        self.model = tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        letters = bytes_to_unicode()
        self.bytes = {letter: byte for byte, letter in letters.items()}
        self.pieces = {
            i: "".join(letters[b] for b in self.model.decode_single_token_bytes(i))
            for i in range(self.model.n_vocab)
        }
        self.indices = {piece: i for i, piece in self.pieces.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder, **kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return dict(self.indices)

    def _tokenize(self, text, **kwargs):
        return [self.pieces[i] for i in self.model.encode(text, allowed_special="all")]

    def _convert_token_to_id(self, token):
        return self.indices.get(token)

    def _convert_id_to_token(self, index):
        return self.pieces.get(index)

    def convert_tokens_to_string(self, tokens):
        found = bytes(self.bytes[letter] for letter in "".join(tokens))
        return found.decode("utf-8", "replace")
