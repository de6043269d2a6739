"""Tiny random checkpoints with the structure of each target family: class, nested config, keys on disk.

Every parameter is drawn anew, norm gains and biases too, so that a wrong norm convention or a key
read from the wrong place changes the logits. The text that a checkpoint makes varies and rarely ends.
"""

import json
import tempfile
from pathlib import Path

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from family_configs import END, FAMILIES, TOKENS, Family
from family_layouts import (
    add_deepseek_mtp,
    add_qwen_mtp,
    gemma_on_hub,
    to_block_fp8,
    to_deepseek_fp8,
)
from kimi_layout import kimi_on_hub, to_packed_int4
from llama_layouts import to_fp8_dynamic, to_w4a16
from tiny_target import make_tokenizer

# save_pretrained splits Qwen's experts, and writes Kimi in names that no reader knows
AS_IN_MODEL = {"kimi_k25", "qwen3_5_moe"}
# name -> the family whose weights it holds, and what turns them into the files on the hub
CHANGED = {
    "deepseek_v3": ("deepseek_v3", [add_deepseek_mtp]),
    "deepseek_v3_fp8": ("deepseek_v3", [add_deepseek_mtp, to_deepseek_fp8]),
    "gemma3": ("gemma3", [gemma_on_hub]),
    "kimi_k25": ("kimi_k25", [kimi_on_hub]),
    "kimi_k25_int4": ("kimi_k25", [kimi_on_hub, to_packed_int4]),
    "llama_fp8": ("llama", [to_fp8_dynamic]),
    "llama_int4": ("llama", [to_w4a16]),
    "qwen3_5_mtp": ("qwen3_5", [add_qwen_mtp]),
    "qwen3_5_fp8": ("qwen3_5", [add_qwen_mtp, to_block_fp8]),
}
NAMES: tuple[str, ...] = tuple(sorted(FAMILIES | CHANGED))
SEED = 0
SHARD_SIZE = "200KB"


def make(name: str, folder: Path) -> Path:
    """Writes the checkpoint `name` to `folder`: config, generation config, bf16 shards with their
    index, tokenizer with chat template. The same name gives the same tensors."""
    base, changes = CHANGED.get(name, (name, []))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = random_model(FAMILIES[base])
        config, tensors = saved(model)
        if base in AS_IN_MODEL:
            tensors = model.state_dict()
        for change in changes:
            change(config, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_shards(tensors, folder)
    GenerationConfig(bos_token_id=0, eos_token_id=END, pad_token_id=0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def random_model(family: Family) -> PreTrainedModel:
    """The family's model in bf16, all its parameters and saved buffers drawn anew."""
    config = AutoConfig.for_model(family.model_type, **family.settings)
    model = getattr(transformers, family.architecture)(config)
    for value in model.state_dict().values():
        noise = torch.randn(value.shape)
        if value.dim() < 2:  # gains and biases keep what they start from, 1 or 0
            value.add_(0.25 * noise)
        else:
            value.copy_(1.5 * noise * value.shape[-1] ** -0.5)
    head = model.get_output_embeddings().weight.detach()
    head[TOKENS:] *= 0.1  # placeholders, which have no text
    if head.data_ptr() == model.get_input_embeddings().weight.data_ptr():
        head *= 0.4  # or the last token's own embedding makes it the next one, for ever
    else:
        head[END] *= 0.1
    return model.to(torch.bfloat16)


def saved(model: PreTrainedModel) -> tuple[dict, dict[str, torch.Tensor]]:
    """The config and the tensors that save_pretrained writes, under their names on disk."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return config, load_file(Path(folder) / "model.safetensors")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """name on disk -> tensor, of all safetensors files of a folder."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def write_shards(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=SHARD_SIZE)
    for file, keys in split.filename_to_tensors.items():
        shard = {key: tensors[key].contiguous() for key in keys}
        save_file(shard, folder / file, metadata={"format": "pt"})
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
