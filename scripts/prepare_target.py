"""The target's manifest, its head, and its checkpoint where it is built here (from GGUF).

The weights are not loaded: index and headers say what is there, and only the head's tensors are read.
"""

import argparse
from pathlib import Path

import torch
from huggingface_hub import snapshot_download

from draftmill import (
    checkpoint_files,
    target_parts,
    target_tokenizer,
    tensor_files,
    tokenizer_checks,
)
from draftmill.atomic import sha256_of, write_json
from draftmill.checkpoint_fit import check_fit
from draftmill.checkpoint_names import Conversion
from draftmill.dtype_policy import BYTES, DTYPES, Ledger
from draftmill.gguf_checkpoint import build_from_gguf
from draftmill.stage import Stage
from draftmill.target_config import angle_border, config_of, context_length, stop_ids, text_config
from draftmill.target_head import TargetHead
from draftmill.target_location import package_file
from draftmill.target_manifest import located
from draftmill.target_skeleton import Skeleton
from draftmill.target_structure import layer_count, model_of

# of the same weights, in formats that nothing here reads
OTHER_FORMATS = [
    "original/*",
    "consolidated*",
    "*.bin",
    "*.pth",
    "*.pt",
    "*.gguf",
    "*.onnx",
    "*.h5",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Stage.parse)
    parser.add_argument("--golden", type=Path, nargs="?", help="golden table of the tokenizer")
    parser.add_argument("--manifest", required=True, type=Path)
    parser.add_argument("--head", required=True, type=Path)
    options = parser.parse_args()
    prepare(options.settings, options.manifest, options.head, options.golden)


def prepare(stage: Stage, manifest_path: Path, head_path: Path, golden: Path | None = None) -> None:
    settings = stage.config
    files = {}
    if settings["package"]:
        checkpoint = manifest_path.parent / "checkpoint"
        gguf = package_file(settings["package"], settings["gguf"])
        elsewhere = settings["tokenizer"]["path"] or settings["tokenizer"]["hub"]
        build_from_gguf(gguf, checkpoint, proven=bool(golden or elsewhere))
        files = {p.name: sha256_of(p) for p in sorted(checkpoint.iterdir())}
        location = checkpoint.name
    elif settings["hub"]:
        location = snapshot_download(
            settings["hub"], revision=settings["revision"], ignore_patterns=OTHER_FORMATS
        )
    else:
        location = str(Path(settings["path"]).resolve())
    manifest = {
        "checkpoint": location,
        "trust_remote_code": settings["trust_remote_code"],
        "tokenizer_source": target_tokenizer.source_of(settings["tokenizer"], location),
    }
    loaded = located(manifest, manifest_path.parent)
    config = config_of(loaded)
    tokenizer, as_file = tokenizer_checks.checked(loaded, settings["tokenizer"], golden)
    manifest["tokenizer_source"]["as_file"] = as_file
    ledger = Ledger()
    tensors = head_tensors(loaded, settings["dtype"], ledger)
    ends = stop_ids(loaded)
    tokenizer_checks.check_fits(tokenizer, ends, tensors["embed_tokens.weight"].shape[0])
    for marker in tokenizer_checks.unknown_markers(tokenizer):
        print(f"tokenizer: the template's {marker} is several tokens", flush=True)
    text = text_config(config)
    described = {
        "name": settings["hub"] or settings["package"] or Path(settings["path"]).name,
        "architectures": config.architectures,
        "model_type": config.model_type,
        "hidden_size": text.hidden_size,
        "layers": layer_count(config),
        "vocab_size": tensors["lm_head.weight"].shape[0],
        "embedding_rows": tensors["embed_tokens.weight"].shape[0],
        "context_length": context_length(text),
        "angle_border": angle_border(text),
        "stop_ids": ends,
        "dtype": settings["dtype"],
        "tokenizer": target_tokenizer.tokenizer_digest(loaded),
        "chat_template": target_tokenizer.template_digest(tokenizer),
        "files": files,
        "weight_bytes": weight_bytes(loaded, settings["dtype"]),
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
    plain = model_of(manifest)
    parts = target_parts.find(folder, plain, Conversion(plain))
    check_fit(skeleton.model, skeleton.conversion, skeleton.gathered, folder)
    tensors = target_parts.read(folder, parts, DTYPES[dtype])
    for name, tensor in tensors.items():
        ledger.expect(f"target head ({name})", tensor.dtype, dtype)
    head = TargetHead(manifest, tensors)
    logits = head(torch.zeros(1, 1, tensors["embed_tokens.weight"].shape[1], dtype=DTYPES[dtype]))
    ledger.expect("logits of the head", logits.dtype, dtype)
    return tensors


def weight_bytes(manifest: dict, dtype: str) -> int:
    """Bytes of the whole model in memory, dequantised."""
    model = model_of(manifest)
    return sum(p.numel() for p in model.parameters()) * BYTES[dtype]


if __name__ == "__main__":
    main()
