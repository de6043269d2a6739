"""What the checkpoints of others have in common: keys that may not be lost, rotary angles, layers, target."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import torch
from speculators import SpeculatorModelConfig
from speculators.config import SpeculatorsConfig, VerifierConfig
from transformers import PretrainedConfig

from draftmill.errors import DraftmillError
from draftmill.rotary import ROPE_KEYS, ROPE_OF_IMAGES, ROPE_TYPES
from draftmill.speculators_drafter import proposal

# say nothing about what a forward pass computes
DESCRIPTIONS = {*PretrainedConfig().to_dict(), "auto_map", "pretraining_tp", "target_model_type"}
DESCRIPTIONS |= {"_name_or_path", "architectures", "dtype", "model_type", "torch_dtype"}
DESCRIPTIONS |= {"transformers_version", "use_cache", "initializer_range", "tie_word_embeddings"}
TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}  # of the target's tokenizer


@dataclass(frozen=True)
class Foreign:
    """A drafter as speculators would have saved it.

    config: its layer ids are speculators', one above output_of. tensors: under speculators' names; embedding
    and head are missing where the checkpoint borrows the target's. remarks: what a reader of the figures
    should know.
    """

    format: str
    config: SpeculatorModelConfig
    tensors: dict[str, torch.Tensor]
    layers: list[int]
    remarks: list[str] = field(default_factory=list)


def refuse_unknown(source: dict, known: set[str], where: object, part: str = "") -> None:
    """Refuses a key that could change what the drafter computes, and that nothing here reads."""
    unknown = sorted(k for k, v in source.items() if k not in known and v is not None)
    if unknown:
        raise DraftmillError(
            f"{where}: {part}{unknown[0]} is {source[unknown[0]]!r}, which speculators' model cannot represent, "
            "so the drafter would compute something else; take another checkpoint, or delete the key from a copy "
            "if it changes no output."
        )


def refuse_values(source: dict, neutral: dict[str, tuple], where: object, part: str = "") -> None:
    """The same for keys that are known to change nothing at these values, or at null."""
    for key, values in neutral.items():
        found = source.get(key)
        if found is not None and found not in values:
            refuse_unknown({key: found}, set(), where, part)


def decoder(
    kind: type, source: dict, handled: set[str], theta: float | None, where: object
) -> tuple[PretrainedConfig, list[str]]:
    """The drafter's decoder layers as a transformers configuration, and remarks.

    kind: LlamaConfig or Qwen3Config. handled: keys of `source` that the caller reads itself. theta: the rotary
    base where the file names none; None refuses that. Raises DraftmillError for what would be lost.
    """
    fields = {f.name for f in dataclasses.fields(kind)} - DESCRIPTIONS - {"rope_parameters"}
    fields |= TOKENS
    rotary = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
    refuse_unknown(source, fields | rotary | handled | DESCRIPTIONS, where)
    angles, remarks = rope_parameters(source, theta, where)
    kept = {k: v for k, v in source.items() if k in fields and v is not None}
    try:
        return kind(**kept, rope_parameters=angles), remarks
    except Exception as error:  # nonsense in it, which transformers reports in many ways
        reason = " ".join(str(error).split())[:200]
        raise DraftmillError(
            f"{where}: transformers cannot make decoder layers of it ({reason}); correct it, or download the "
            "checkpoint again."
        ) from None


def rope_parameters(source: dict, theta: float | None, where: object) -> tuple[dict, list[str]]:
    """transformers' rope_parameters of a configuration that was written for an older or newer one."""
    places = [source[k] for k in ("rope_parameters", "rope_scaling") if source.get(k)]
    given = places[0] if places else {}
    if not isinstance(given, dict) or any(place != given for place in places):
        raise DraftmillError(
            f"{where}: rope_parameters and rope_scaling contradict one another or are no objects "
            f"({places!r}); correct a copy of it."
        )
    base = given.get("rope_theta", source.get("rope_theta"))
    base = theta if base is None else base
    if base is None:
        raise DraftmillError(
            f"{where}: names no rope_theta, which engines fill in differently; add the one it was trained with."
        )
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise DraftmillError(
            f"{where}: its rotary angles are '{kind}', which change with the length of the text or with the kind "
            f"of layer, so one pass over a text gives others than drafting does; supported are "
            f"{', '.join(ROPE_TYPES)}."
        )
    refuse_values(source, {"partial_rotary_factor": (1.0,)}, where)
    refuse_values(given, {"partial_rotary_factor": (1.0,)}, where, "rope_parameters.")
    refuse_unknown(
        given,
        ROPE_KEYS | ROPE_OF_IMAGES | {"rope_type", "type", "partial_rotary_factor"},
        where,
        "rope_parameters.",
    )
    left_out = sorted(ROPE_OF_IMAGES & given.keys())
    remarks = [f"rotary {key} left out: equal for text" for key in left_out]
    kept = {k: v for k, v in given.items() if k in ROPE_KEYS and v is not None}
    return kept | {"rope_type": kind, "rope_theta": float(base)}, remarks


def check_layers(layers: list[int], configured: list[int], manifest: dict, where: object) -> None:
    """Refuses layers (as output_of) that no capture of this target holds, or that the configuration does not name."""
    last = manifest["layers"] - 1
    if not layers or layers != sorted(set(layers)) or layers[0] < 0:
        raise DraftmillError(
            f"{where}: reads output_of {layers}, expected distinct layers in ascending order, the order of the "
            "stored states."
        )
    if layers[-1] > last:
        raise DraftmillError(
            f"{where}: reads output_of {layers[-1]}, but the target has {last + 1} decoder layers, 0 to {last}; "
            "the drafter was made for another target."
        )
    if layers[-1] == last:
        raise DraftmillError(
            f"{where}: reads output_of {last}, the target's final layer, whose state some engines take before "
            "and some after the final norm; such a drafter is not supported."
        )
    if layers != configured:
        raise DraftmillError(
            f"{where}: the drafter reads output_of {layers}, but the configuration names {configured}; write "
            f"{layers} there."
        )


def check_target(sizes: dict[str, object], manifest: dict, where: object) -> None:
    """Refuses a drafter whose sizes are not the target's. sizes: of hidden_size, vocab_size, layers."""
    for key, found in sizes.items():
        if found is not None and found != manifest[key]:
            raise DraftmillError(
                f"{where}: was made for a target with {key} {found}, but {manifest['name']} has "
                f"{manifest[key]}; it belongs to another target."
            )


def speculators_config(algorithm: str, tokens: int, manifest: dict) -> SpeculatorsConfig:
    """The drafter's proposal of `tokens` greedy tokens, and the target that it is measured with."""
    architectures = manifest["architectures"] or []
    verifier = VerifierConfig(name_or_path=manifest["name"], architectures=architectures)
    return proposal(algorithm, tokens, verifier)


def check_architecture(source: dict, known: tuple[str, ...], kind: str, where: Path) -> None:
    """Refuses another architecture than those `known`, or another model_type than `kind`."""
    for name in source.get("architectures") or []:
        if name not in known:
            raise DraftmillError(
                f"{where}: is a {name}, but what can be imported is {', '.join(known)}; other drafters have "
                "parts that would be lost."
            )
    if source.get("model_type") != kind:
        raise DraftmillError(
            f"{where}: model_type is {source.get('model_type')!r}, expected {kind!r}: its decoder layers would "
            "be computed otherwise."
        )
