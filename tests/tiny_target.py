"""A tiny chat model with real structure, made in a second: what the tests train drafters for."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = Path(__file__).resolve().parents[1] / "resources" / "eval_prompts.jsonl"


def make_tokenizer(template: str | None = CHATML, vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE, trained on the written prompts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.read_text(encoding="utf-8").splitlines(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = template
    return fast


def make_config(**changes) -> LlamaConfig:
    settings = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaConfig(**settings | changes)


def make_target(folder: Path, template: str | None = CHATML, seed: int = 0, **changes) -> Path:
    """Writes a bf16 checkpoint with tokenizer and chat template to `folder`.

    Its weights are spread so that greedy text varies and rarely ends at once.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(make_config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
        model.lm_head.weight[2] *= 0.1  # the end token
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return folder


def edit_tokenizer_config(folder: Path, **changes) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_target_that_stops(folder: Path) -> Path:
    """One whose answers end with the end token after any number of tokens, or not within a small limit."""
    make_target(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][2] *= 20
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
