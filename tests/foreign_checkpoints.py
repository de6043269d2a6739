"""Tiny drafters in the formats in which others publish theirs, and their import."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

import import_drafter
from draftmill.atomic import read_json
from draftmill.stage import Stage
from mini_road import MiniRoad
from workflow import tiny_config

HIDDEN, HEADS, SHARED, HEAD_DIM, INNER = 64, 4, 2, 24, 96
LAYERS = [0, 2, 3]  # output_of
KEPT = [1, 2, 5, 9, *range(40, 100), 400]  # of the target's vocabulary
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": SHARED,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "attention_bias": False,
    "rope_theta": 50000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
}

YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}


class Target:
    """A prepared target of a run: its manifest and head."""

    def __init__(self, folder: Path):
        self.path, self.head = folder / "manifest.json", folder / "head.safetensors"
        self.manifest = read_json(self.path)

    @classmethod
    def of(cls, checkpoint: Path) -> "Target":
        """Prepares a checkpoint in the current folder."""
        road = MiniRoad(tiny_config(checkpoint))
        road.prepare_target()
        return cls(road.target.parent)

    def stage(self, algorithm: str, folder: Path, layers: list[int]) -> Stage:
        config = {
            "algorithm": algorithm,
            "path": str(folder),
            "hub": None,
            "revision": None,
            "layers": {"output_of": layers},
            "digest": "0" * 32,
        }
        value = {"rule": "import_drafter", "code": "0" * 16, "config": config}
        inputs = {"target": self.manifest["fingerprint"]}
        return Stage.parse(json.dumps(value | {"inputs": inputs}))

    def imported(self, algorithm: str, folder: Path, layers: list[int] = LAYERS) -> Path:
        """The folder of the imported drafter."""
        output = folder.parent / f"{folder.name}-imported"
        stage = self.stage(algorithm, folder, layers)
        import_drafter.import_checkpoint(stage, self.path, self.head, output)
        return output


class Checkpoint:
    """A config.json and tensors, to be changed and then written."""

    def __init__(self, config: dict, tensors: dict[str, torch.Tensor]):
        self.config, self.tensors = config, tensors

    def write(self, folder: Path, kind: str = "safetensors") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2))
        tensors = {k: v.contiguous() for k, v in self.tensors.items()}
        if kind == "safetensors":
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        elif kind == "pickle":
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            write_shards(tensors, folder, kind)
        return folder


def write_shards(tensors: dict, folder: Path, kind: str) -> None:
    """Several files with an index: kind is 'shards' (safetensors) or 'pickles'."""
    pattern, index = "model{suffix}.safetensors", "model.safetensors.index.json"
    if kind == "pickles":
        pattern, index = "pytorch_model{suffix}.bin", "pytorch_model.bin.index.json"
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern=pattern, max_shard_size="40KB"
    )
    assert len(split.filename_to_tensors) > 1
    for file, names in split.filename_to_tensors.items():
        shard = {name: tensors[name] for name in names}
        if kind == "pickles":
            torch.save(shard, folder / file)
        else:
            save_file(shard, folder / file, {"format": "pt"})
    (folder / index).write_text(json.dumps({"weight_map": split.tensor_to_filename}))


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """bf16 weights with outputs of about unit size; norm gains around 1."""
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape)
        gain = len(shape) == 1 and not name.endswith("bias")
        made[name] = (1 + 0.3 * noise if gain else noise * 1.5 * shape[-1] ** -0.5).bfloat16()
    return made


def layer_shapes(prefix: str, inputs: int = HIDDEN, norms: bool = True) -> dict[str, tuple]:
    """The weights of one decoder layer; inputs: width of what enters q, k and v."""
    shapes = {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, inputs),
        "self_attn.k_proj.weight": (SHARED * HEAD_DIM, inputs),
        "self_attn.v_proj.weight": (SHARED * HEAD_DIM, inputs),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if norms:
        shapes |= {f"self_attn.{n}_norm.weight": (HEAD_DIM,) for n in "qk"}
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def biases(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A random bias for each of q, k, v and o."""
    names = [n for n in tensors if n.endswith(tuple(f"{p}_proj.weight" for p in "qkvo"))]
    return random_tensors({n.replace("weight", "bias"): (tensors[n].shape[0],) for n in names})


def dflash_checkpoint(target: dict, layers: list[int] = LAYERS, depth: int = 2) -> Checkpoint:
    """z-lab's layout."""
    config = SHAPE | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": 4,
        "dflash_config": {"target_layer_ids": layers, "mask_token_id": 7},
        "num_hidden_layers": depth,
        "num_target_layers": target["layers"],
        "layer_types": ["full_attention"] * depth,
        "vocab_size": target["vocab_size"],
    }
    shapes = {"fc.weight": (HIDDEN, len(layers) * HIDDEN)}
    shapes |= {"norm.weight": (HIDDEN,), "hidden_norm.weight": (HIDDEN,)}
    for index in range(depth):
        shapes |= layer_shapes(f"layers.{index}")
    return Checkpoint(config, random_tensors(shapes))


def eagle3_checkpoint(
    target: dict, kept: list[int] | None = None, embedding: bool = False
) -> Checkpoint:
    """SafeAILab's layout; kept: the draft vocabulary, KEPT unless given."""
    kept, vocab = KEPT if kept is None else kept, target["vocab_size"]
    config = SHAPE | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "pretraining_tp": 1,
        "draft_vocab_size": len(kept),
        "vocab_size": vocab,
    }
    shapes = {"fc.weight": (HIDDEN, len(LAYERS) * HIDDEN), "norm.weight": (HIDDEN,)}
    shapes |= {"midlayer.hidden_norm.weight": (HIDDEN,), "lm_head.weight": (len(kept), HIDDEN)}
    shapes |= layer_shapes("midlayer", inputs=2 * HIDDEN, norms=False)
    if embedding:
        shapes["embed_tokens.weight"] = (vocab, HIDDEN)
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[kept] = True
    maps = {"t2d": t2d, "d2t": torch.tensor(kept) - torch.arange(len(kept))}
    return Checkpoint(config, random_tensors(shapes) | maps)


def written(
    builder: Callable[..., Checkpoint],
    target: Target,
    folder: Path,
    change: Callable[[Checkpoint], None] | None = None,
    kind: str = "safetensors",
    **options,
) -> Path:
    """The folder of the builder's checkpoint for this target, once `change` is made to it."""
    checkpoint = builder(target.manifest, **options)
    if change:
        change(checkpoint)
    return checkpoint.write(folder, kind)


def with_config(**changes) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.config.update(changes)


def with_dflash(**changes) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.config["dflash_config"].update(changes)


def with_windows(*kinds: str, **more) -> Callable[[Checkpoint], None]:
    kinds = [f"{kind}_attention" for kind in kinds]
    return with_config(use_sliding_window=True, sliding_window=64, layer_types=kinds, **more)


def without(*names: str) -> Callable[[Checkpoint], None]:
    def change(checkpoint: Checkpoint) -> None:
        for name in names:
            del checkpoint.tensors[name]

    return change


def remarks(output: Path) -> list[str]:
    """What run.json tells of an imported drafter."""
    return json.loads((output / "run.json").read_text())["imported"]["remarks"]
