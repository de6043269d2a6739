"""DFlash checkpoints of others: z-lab's layout (SpecForge too) and speculators' own.

z-lab's target_layer_ids are output_of, speculators' aux ids one higher. z-lab's model borrows the target's
embedding and lm_head.
"""

from pathlib import Path

import torch
from speculators.models.dflash import DFlashSpeculatorConfig
from torch import nn
from transformers import PretrainedConfig, Qwen3Config

from draftmill import foreign_files, foreign_speculators
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

ARCHITECTURES = ("DFlashDraftModel",)
OWN = {"target_layer_ids", "mask_token_id", "block_size"}  # in dflash_config or beside it
# parts that speculators' model lacks, at the values where they do nothing
NEUTRAL = {
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "final_logit_softcapping": (0,),
    "attention_value_scale": (1.0,),
    "attention_sink_bias": (False,),
    "sample_from_anchor": (False,),
    "use_swa": (False,),
}
HANDLED = {*OWN, *NEUTRAL, "dflash_config", "num_target_layers", "is_causal"}
BLOCK_SIZE = 16  # z-lab's loader's, where the file names none
SLIDING = "sliding_attention"


def read(folder: Path, manifest: dict, configured: list[int]) -> Foreign:
    """The drafter in `folder` as speculators would have saved it.

    configured: output_of that the configuration names. Raises DraftmillError where it cannot be represented
    exactly, or belongs to another target or other layers.
    """
    config, remarks = described(folder, manifest, configured)
    tensors = foreign_files.read_tensors(folder)
    kept = {n: t for n, t in tensors.items() if n not in foreign_speculators.OF_THE_TARGET}
    return Foreign(
        foreign_speculators.format_of(folder, "DFlash"), config, kept, configured, remarks
    )


def described(
    folder: Path, manifest: dict, configured: list[int]
) -> tuple[DFlashSpeculatorConfig, list[str]]:
    """Its configuration alone, and remarks; refused as in `read`."""
    source, where = foreign_files.read_config(folder), folder / foreign_files.CONFIG
    made = of_speculators if foreign_speculators.MARK in source else of_original
    config, remarks = made(source, manifest, configured, where)
    return config, remarks


def of_original(
    source: dict, manifest: dict, configured: list[int], where: Path
) -> tuple[DFlashSpeculatorConfig, list[str]]:
    check_architecture(source, ARCHITECTURES, "qwen3", where)
    inner = source.get("dflash_config") or {}
    refuse_unknown(inner, {*OWN, *NEUTRAL}, where, "dflash_config.")
    refuse_values(inner, NEUTRAL, where, "dflash_config.")
    refuse_values(source, NEUTRAL, where)
    sizes = {key: source.get(key) for key in ("hidden_size", "vocab_size")}
    check_target(sizes | {"layers": source.get("num_target_layers")}, manifest, where)
    layers, remarks = decoder(Qwen3Config, source, HANDLED, None, where)
    own = {key: inner.get(key, source.get(key)) for key in OWN}
    ids = own["target_layer_ids"]
    if ids is None:
        ids = default_layers(manifest["layers"], layers.num_hidden_layers)
        remarks.append("names no layers; they are those that z-lab's loader takes then")
    check_layers(ids, configured, manifest, where)
    block_size = own["block_size"] or BLOCK_SIZE
    check_mask_token(own["mask_token_id"], manifest, where)
    causal = source.get("is_causal")
    remarks += check_windows(layers, block_size, causal, where)
    return DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=layers.vocab_size,
        block_size=block_size,
        aux_hidden_state_layer_ids=[i + 1 for i in ids],
        mask_token_id=own["mask_token_id"],
        sliding_window_non_causal=causal is False,
        speculators_config=speculators_config("dflash", block_size - 1, manifest),
    ), remarks


def of_speculators(
    source: dict, manifest: dict, configured: list[int], where: Path
) -> tuple[DFlashSpeculatorConfig, list[str]]:
    refuse_values(source, {"sample_from_anchor": (False,)}, where)
    fields, remarks = foreign_speculators.own_fields(DFlashSpeculatorConfig, source, where)
    layers = fields["transformer_layer_config"]
    if layers.model_type != "qwen3":
        raise DraftmillError(
            f"{where}: its layers are of model_type {layers.model_type!r}, expected 'qwen3' in a DFlash drafter."
        )
    check_target({k: getattr(layers, k) for k in ("hidden_size", "vocab_size")}, manifest, where)
    for key in ("block_size", "draft_vocab_size", "aux_hidden_state_layer_ids"):
        if fields.get(key) is None:
            raise DraftmillError(f"{where}: names no {key}; download the checkpoint again.")
    check_layers([i - 1 for i in fields["aux_hidden_state_layer_ids"]], configured, manifest, where)
    check_mask_token(fields.get("mask_token_id"), manifest, where)
    if SLIDING in layers.layer_types and "sliding_window_non_causal" not in fields:
        raise DraftmillError(
            f"{where}: does not say sliding_window_non_causal, which speculators takes as false and vLLM as true; "
            "add what it was trained with."
        )
    remarks += check_windows(layers, fields["block_size"], None, where)
    tokens = foreign_speculators.proposed_tokens(source, fields["block_size"] - 1)
    own = speculators_config("dflash", tokens, manifest)
    return DFlashSpeculatorConfig(**fields, speculators_config=own), remarks


def default_layers(count: int, drafter_layers: int) -> list[int]:
    """What z-lab's loader reads where the file names no layers, as output_of."""
    if drafter_layers == 1:
        return [count // 2]
    return [round(1 + i * (count - 4) / (drafter_layers - 1)) for i in range(drafter_layers)]


def check_mask_token(token: object, manifest: dict, where: Path) -> None:
    if type(token) is not int or not 0 <= token < manifest["embedding_rows"]:
        raise DraftmillError(
            f"{where}: mask_token_id is {token!r}, expected the id of one of the target's "
            f"{manifest['embedding_rows']} embeddings; correct a copy of it."
        )


def check_windows(
    layers: PretrainedConfig, block_size: int, causal: bool | None, where: Path
) -> list[str]:
    """Remarks on windows; refuses attention that speculators' masks cannot express.

    There full layers see the whole block, and sliding ones see it whole or causally, by one flag.
    """
    kinds, window = layers.layer_types, layers.sliding_window
    known = {"full_attention", SLIDING}
    if not set(kinds) <= known:
        raise DraftmillError(
            f"{where}: layer_types are {kinds}, expected {' or '.join(sorted(known))} for each layer; others cannot "
            "be imported."
        )
    if SLIDING in kinds and (window is None or window < block_size):
        raise DraftmillError(
            f"{where}: layer_types name {SLIDING}, but the window is {window} (use_sliding_window "
            f"{layers.use_sliding_window}), expected one of at least the block's {block_size} tokens."
        )
    if causal and "full_attention" in kinds:
        raise DraftmillError(
            f"{where}: is_causal is true with full_attention in layer_types: such layers see the block causally, "
            "which speculators' model cannot represent; take another checkpoint."
        )
    if SLIDING not in kinds:
        return []
    return [
        f"windows: speculators counts the {window} positions back from the anchor, z-lab and vLLM from each slot; "
        "the two differ in texts that are longer"
    ]


def skeleton(config: DFlashSpeculatorConfig) -> nn.Module:
    """speculators' model on the meta device, without its copies of the target's norm and head."""
    config.transformer_layer_config._attn_implementation = "sdpa"
    with torch.device("meta"):
        return empty(config)
