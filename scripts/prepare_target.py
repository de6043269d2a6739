"""The target's manifest, its head, and its checkpoint where it is built here (from GGUF).

The weights are not loaded: index and headers say what is there, and only the head's tensors are read.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import transformers
from huggingface_hub import snapshot_download

from draftmill import checkpoint_files, target_model, target_parts, tensor_files
from draftmill.atomic import fsync, sha256_of, write_json
from draftmill.checkpoint_names import check_complete
from draftmill.dtype_policy import BYTES, DTYPES, Ledger
from draftmill.stage import Stage
from draftmill.target_config import config_of, text_config
from draftmill.target_head import TargetHead
from draftmill.target_location import package_file
from draftmill.target_skeleton import Skeleton
from draftmill.target_structure import layer_count, meta_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--manifest", required=True, type=Path)
    parser.add_argument("--head", required=True, type=Path)
    options = parser.parse_args()
    prepare(options.settings, options.manifest, options.head)


def prepare(stage: Stage, manifest_path: Path, head_path: Path) -> None:
    settings = stage.config
    files = {}
    if settings["package"]:
        checkpoint = manifest_path.parent / "checkpoint"
        build_from_gguf(package_file(settings["package"], settings["gguf"]), checkpoint)
        files = {p.name: sha256_of(p) for p in sorted(checkpoint.iterdir())}
        location = checkpoint.name
    elif settings["hub"]:
        location = snapshot_download(settings["hub"], revision=settings["revision"])
    else:
        location = str(Path(settings["path"]).resolve())
    manifest = {"checkpoint": location, "trust_remote_code": settings["trust_remote_code"]}
    loaded = manifest | {"checkpoint": str(manifest_path.parent / location)}
    ledger = Ledger()
    config = config_of(loaded)
    tensors = head_tensors(loaded, settings["dtype"], ledger)
    text = text_config(config)
    described = {
        "name": settings["hub"] or settings["package"] or Path(settings["path"]).name,
        "architectures": config.architectures,
        "model_type": config.model_type,
        "hidden_size": text.hidden_size,
        "layers": layer_count(config),
        "vocab_size": tensors["lm_head.weight"].shape[0],
        "context_length": text.max_position_embeddings,
        "stop_ids": target_model.stop_ids(loaded),
        "dtype": settings["dtype"],
        "tokenizer": target_model.tokenizer_digest(loaded),
        "chat_template": target_model.template_digest(loaded),
        "files": files,
        "weight_bytes": weight_bytes(config, settings),
        "record": stage.record(dtypes=dict(ledger)),
        "fingerprint": stage.fingerprint,
    }
    tensor_files.write(head_path, tensors, stage.record())
    write_json(manifest_path, manifest | described)


def head_tensors(manifest: dict, dtype: str, ledger: Ledger) -> dict[str, torch.Tensor]:
    """embed_tokens.weight, norm.* and lm_head.* of a checkpoint that is whole."""
    folder = Path(manifest["checkpoint"])
    checkpoint_files.check_files(folder)
    skeleton = Skeleton(manifest, DTYPES[dtype], "cpu")
    parts = target_parts.find(folder, skeleton.model, skeleton.conversion)
    tied = set(getattr(skeleton.model, "all_tied_weights_keys", {}))
    check_complete(skeleton.model, skeleton.conversion, skeleton.gathered, folder, tied)
    tensors = target_parts.read(folder, parts, DTYPES[dtype])
    for name, tensor in tensors.items():
        ledger.expect(f"target head ({name})", tensor.dtype, dtype)
    head = TargetHead(manifest, tensors)
    logits = head(torch.zeros(1, 1, tensors["embed_tokens.weight"].shape[1], dtype=DTYPES[dtype]))
    ledger.expect("logits of the head", logits.dtype, dtype)
    return tensors


def weight_bytes(config: transformers.PretrainedConfig, settings: dict) -> int:
    """Bytes of the whole model in memory, dequantised."""
    model = meta_model(config, settings["trust_remote_code"])
    return sum(p.numel() for p in model.parameters()) * BYTES[settings["dtype"]]


def build_from_gguf(gguf: Path, checkpoint: Path) -> None:
    """Unpacks a GGUF into a bf16 checkpoint in Hugging Face layout."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        # without it, weights may stay packed and every matrix product casts them
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).to(DTYPES["bfloat16"])
    model.config.architectures = [type(model).__name__]
    model.config.dtype = DTYPES["bfloat16"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    checkpoint.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=checkpoint.parent, suffix=".tmp") as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for path in sorted(Path(scratch).iterdir()):
            fsync(path)
            os.replace(path, checkpoint / path.name)
    fsync(checkpoint)


if __name__ == "__main__":
    main()
