"""EAGLE-3 checkpoints of others: SafeAILab's layout (SpecForge, lightseek, SGLang) and speculators' own.

Layer ids are written in two conventions under one name: vLLM's is speculators' (the state that enters layer i,
so one above output_of), SpecForge's is output_of itself. The configuration decides; the file must agree with it
in one of them. The first files name none.
"""

from pathlib import Path

import torch
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from torch import nn
from transformers import LlamaConfig

from draftmill import draft_vocab, foreign_files, foreign_speculators
from draftmill.errors import DraftmillError
from draftmill.foreign_drafter import (
    Foreign,
    check_architecture,
    check_layers,
    check_target,
    decoder,
    refuse_unknown,
    refuse_values,
    speculators_config,
)
from draftmill.speculators_drafter import empty

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
FLAGS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)  # false where not named
IDS = "eagle_aux_hidden_state_layer_ids"
WINDOWS = {"sliding_window", "use_sliding_window", "layer_types", "max_window_layers"}
SIZES = {"draft_vocab_size", "target_hidden_size", "num_aux_hidden_states"}
HANDLED = {*FLAGS, IDS, "eagle_config", *WINDOWS, *SIZES}
DEFAULT_THETA = 10_000.0  # of LlamaConfig, which every engine reads these files with
SPECULATIVE_TOKENS = (
    3  # what the exported file proposes to engines that are not told; these files name none
)


def read(folder: Path, manifest: dict, configured: list[int]) -> Foreign:
    """The drafter in `folder` as speculators would have saved it.

    configured: output_of that the configuration names. Raises DraftmillError where it cannot be represented
    exactly, or belongs to another target or other layers.
    """
    config, remarks = described(folder, manifest, configured)
    tensors = {renamed(n): t for n, t in foreign_files.read_tensors(folder).items()}
    tensors = {n: t for n, t in tensors.items() if n not in foreign_speculators.OF_THE_TARGET}
    tensors = with_draft_vocab(tensors, config, folder)
    return Foreign(
        foreign_speculators.format_of(folder, "EAGLE-3"), config, tensors, configured, remarks
    )


def described(
    folder: Path, manifest: dict, configured: list[int]
) -> tuple[Eagle3SpeculatorConfig, list[str]]:
    """Its configuration alone, and remarks; refused as in `read`."""
    source, where = foreign_files.read_config(folder), folder / foreign_files.CONFIG
    made = of_speculators if foreign_speculators.MARK in source else of_official
    config, remarks = made(source, manifest, configured, where)
    check_layers(configured, configured, manifest, where)
    return config, remarks


def of_official(
    source: dict, manifest: dict, configured: list[int], where: Path
) -> tuple[Eagle3SpeculatorConfig, list[str]]:
    check_architecture(source, ARCHITECTURES, "llama", where)
    foreign_speculators.refuse_windows(source, where)
    sizes = {key: source.get(key) for key in ("hidden_size", "vocab_size")}
    check_target(sizes, manifest, where)
    refuse_values(source, {"target_hidden_size": (source.get("hidden_size"),)}, where)
    refuse_values(source, {"num_aux_hidden_states": (len(configured),)}, where)
    eagle = source.get("eagle_config") or {}
    refuse_unknown(eagle, {IDS, "use_aux_hidden_state", "norm_before_fc"}, where, "eagle_config.")
    refuse_values(eagle, {"use_aux_hidden_state": (True,)}, where, "eagle_config.")
    layers, remarks = decoder(LlamaConfig, source, HANDLED, DEFAULT_THETA, where)
    remarks += agreed(eagle.get(IDS) or source.get(IDS), configured, where)
    flags = {flag: bool(source.get(flag, False)) for flag in FLAGS}
    flags["norm_before_fc"] = bool(eagle.get("norm_before_fc", flags["norm_before_fc"]))
    size = source.get("draft_vocab_size") or layers.vocab_size
    return config_of(layers, configured, size, flags, SPECULATIVE_TOKENS, manifest), remarks


def of_speculators(
    source: dict, manifest: dict, configured: list[int], where: Path
) -> tuple[Eagle3SpeculatorConfig, list[str]]:
    fields, remarks = foreign_speculators.own_fields(Eagle3SpeculatorConfig, source, where)
    layers = fields["transformer_layer_config"]
    if "norm_before_residual" not in fields:
        raise DraftmillError(
            f"{where}: does not say norm_before_residual, which speculators takes as false and vLLM as true; add "
            "what it was trained with."
        )
    foreign_speculators.refuse_windows({"layer_types": getattr(layers, "layer_types", None)}, where)
    check_target({k: getattr(layers, k) for k in ("hidden_size", "vocab_size")}, manifest, where)
    ids = fields.get(IDS)
    if ids is None:
        remarks.append("names no layers; they are the configuration's")
    else:
        check_layers([i - 1 for i in ids], configured, manifest, where)
    size = fields.get("draft_vocab_size")
    if size is None:
        raise DraftmillError(f"{where}: names no draft_vocab_size; download the checkpoint again.")
    tokens = foreign_speculators.proposed_tokens(source, SPECULATIVE_TOKENS)
    flags = {flag: bool(fields.get(flag, False)) for flag in FLAGS}
    return config_of(layers, configured, size, flags, tokens, manifest), remarks


def config_of(
    layers: LlamaConfig, output_of: list[int], size: int, flags: dict, tokens: int, manifest: dict
) -> Eagle3SpeculatorConfig:
    # said outright, as in the drafters that are trained here: Llama's own configuration has no windows
    layers.layer_types = ["full_attention"] * layers.num_hidden_layers
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=size,
        eagle_aux_hidden_state_layer_ids=[i + 1 for i in output_of],
        speculators_config=speculators_config("eagle3", tokens, manifest),
        **flags,
    )


def agreed(ids: list[int] | None, configured: list[int], where: Path) -> list[str]:
    """Remarks on how the file names its layers. Raises DraftmillError where it names others."""
    if ids is None:
        return ["names no layers; they are the configuration's"]
    readings = {"vLLM": [i - 1 for i in ids], "SpecForge": ids}
    for engine, reading in readings.items():
        if reading == configured:
            return [f"its layer ids {ids} are read as {engine} means them"]
    raise DraftmillError(
        f"{where}: names the layer ids {ids}, which are output_of {readings['vLLM']} as vLLM and "
        f"{readings['SpecForge']} as SpecForge means them, but the configuration names {configured}; write the "
        "reading that the drafter was trained with there."
    )


def renamed(name: str) -> str:
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def with_draft_vocab(tensors: dict, config: Eagle3SpeculatorConfig, folder: Path) -> dict:
    """The tensors with t2d as bool and d2t as int64, both checked; without them for a full vocabulary."""
    maps = {name: tensors[name] for name in ("t2d", "d2t") if name in tensors}
    rest = {n: t for n, t in tensors.items() if n not in maps}
    full = config.draft_vocab_size == config.target_vocab_size
    if not maps and full:
        return rest
    if len(maps) < 2:
        raise DraftmillError(
            f"{folder}: its weights lack {' and '.join({'t2d', 'd2t'} - maps.keys())}, but its draft vocabulary has "
            f"{config.draft_vocab_size} of {config.target_vocab_size} tokens; without both nobody knows which."
        )
    t2d, d2t = maps["t2d"].bool(), maps["d2t"].long()
    draft_vocab.check(t2d, d2t, f"{folder} (weights)")
    if len(t2d) != config.target_vocab_size or len(d2t) != config.draft_vocab_size:
        raise DraftmillError(
            f"{folder}: its weights map {len(d2t)} of {len(t2d)} tokens, but its config.json says "
            f"{config.draft_vocab_size} of {config.target_vocab_size}; download the checkpoint again."
        )
    return rest if full else rest | {"t2d": t2d, "d2t": d2t}


def skeleton(config: Eagle3SpeculatorConfig) -> nn.Module:
    """speculators' model on the meta device, without its copies of the target's norm and head."""
    config.transformer_layer_config._attn_implementation = "sdpa"
    with torch.device("meta"):
        return empty(config)
