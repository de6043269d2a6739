"""The target's manifest, its head, and its checkpoint where it is built here (from GGUF)."""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import transformers
from huggingface_hub import snapshot_download

from draftmill import target_head, target_model, target_tokenizer, tokenizer_checks
from draftmill.atomic import fsync, sha256_of, write_json
from draftmill.dtype_policy import DTYPES, Ledger
from draftmill.stage import Stage
from draftmill.target_location import package_file


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
        build_from_gguf(package_file(settings["package"], settings["gguf"]), checkpoint)
        files = {p.name: sha256_of(p) for p in sorted(checkpoint.iterdir())}
        location = checkpoint.name
    elif settings["hub"]:
        location = snapshot_download(settings["hub"], revision=settings["revision"])
    else:
        location = str(Path(settings["path"]).resolve())
    manifest = {
        "checkpoint": location,
        "trust_remote_code": settings["trust_remote_code"],
        "tokenizer_source": target_tokenizer.source_of(settings["tokenizer"], location),
    }
    loaded = target_model.located(manifest, manifest_path.parent)
    tokenizer = tokenizer_checks.checked(loaded, settings["tokenizer"], golden)
    model = target_model.load(loaded, settings["dtype"])
    ledger = Ledger()
    ledger.expect_module("target weights", model, settings["dtype"])
    stop_ids = target_model.stop_ids(loaded)
    rows = model.get_input_embeddings().weight.shape[0]
    tokenizer_checks.check_fits(tokenizer, stop_ids, rows)
    for marker in tokenizer_checks.unknown_markers(tokenizer):
        print(f"tokenizer: the template's {marker} is several tokens", flush=True)
    text = target_model.text_config(model.config)
    described = {
        "name": settings["hub"] or settings["package"] or Path(settings["path"]).name,
        "architectures": model.config.architectures,
        "model_type": model.config.model_type,
        "hidden_size": text.hidden_size,
        "layers": text.num_hidden_layers,
        "vocab_size": model.get_output_embeddings().weight.shape[0],
        "context_length": text.max_position_embeddings,
        "stop_ids": stop_ids,
        "dtype": settings["dtype"],
        "tokenizer": target_tokenizer.tokenizer_digest(loaded),
        "chat_template": target_tokenizer.template_digest(tokenizer),
        "files": files,
        "record": stage.record(dtypes=dict(ledger)),
        "fingerprint": stage.fingerprint,
    }
    target_head.save(model, head_path, stage.record())
    write_json(manifest_path, manifest | described)


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
