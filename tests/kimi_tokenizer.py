"""The tokenizer of Kimi-K2.5 in miniature, as its files stand on the hub."""

import base64
import json
import shutil
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from draftmill import golden_table

CODE = Path(__file__).parent / "own_code" / "tokenization_kimi.py"
RANKS = 500
END = 502
SPECIAL = {
    500: "[BOS]",
    501: "[EOS]",
    END: "<|im_end|>",
    503: "<|im_user|>",
    504: "<|im_assistant|>",
    505: "<|im_system|>",
    506: "<|im_middle|>",
    507: "[UNK]",
    508: "[PAD]",
}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>'"
    " + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
WITHOUT_HAN = TikTokenConverter().pattern


def put(folder: Path) -> Path:
    """Replaces the tokenizer in a checkpoint's folder, with the ids that end its answers."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    lines = [f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(ranks())]
    (folder / "tiktoken.model").write_text("".join(lines))
    shutil.copy(CODE, folder / CODE.name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokens = {
        str(i): {"content": text, "normalized": False, "special": True}
        for i, text in SPECIAL.items()
    }
    config = {
        "added_tokens_decoder": tokens,
        "additional_special_tokens": [t for t in SPECIAL.values() if t.startswith("<|")],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder


def ranks() -> list[bytes]:
    """Byte pieces in the order of their merges, trained on text in which Han and Latin touch, so that some
    pieces reach over the border."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WITHOUT_HAN), behavior="isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=RANKS, initial_alphabet=by_bytes.alphabet(), show_progress=False
    )
    texts = [
        t for t, kind in golden_table.read_probes().items() if "Han" in kind or kind == "Chinese"
    ]
    tokenizer.train_from_iterator(texts * 4, trainer)
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [bytes(letters[letter] for letter in piece) for piece, _ in vocab]


def use_pattern(folder: Path, pattern: str) -> None:
    """Gives the own code another splitting pattern."""
    with (folder / CODE.name).open("a", encoding="utf-8") as file:
        file.write(f"\n\nPATTERN = {pattern!r}\n")
