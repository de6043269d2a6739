"""Whether the tensors on disk are the model's: none missing, none of another shape, none left over.

transformers makes a missing weight random, and leaves out what its model does not know, each with a warning.
"""

import re
from collections import Counter, defaultdict
from math import prod
from pathlib import Path

from torch import nn
from transformers.core_model_loading import WeightConverter

from draftmill import checkpoint_files
from draftmill.checkpoint_names import Conversion
from draftmill.errors import DraftmillError
from draftmill.target_config import quantisation
from draftmill.target_parts import PLAIN
from draftmill.target_structure import decoder_layers, final_norm, output_head, path_of

OPTIONAL = "activation"  # scales of activations, which dequantised weights do without
# beside a layer's weights: rotary frequencies and causal masks of old checkpoints, scales of a quantised cache
HARMLESS = re.compile(r"(inv_freq|masked_bias|attn\.bias|_scale)$")
Gathered = dict[str, list[tuple[str, str | None]]]


def check_fit(model: nn.Module, conversion: Conversion, gathered: Gathered, folder: Path) -> None:
    """Refuses a checkpoint whose weights are not exactly those of the model.

    model: on the meta device. gathered: parameter -> its tensors on disk. Raises DraftmillError that names the
    first weight.
    """
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    check_missing(model, conversion, gathered, folder, tied)
    for target, sources in gathered.items():
        converter = conversion.by_source.get(sources[0][1])
        if converter is not None:
            check_sources(conversion, converter, target, sources, folder)
        check_shapes(conversion, target, sources, folder)
        check_scales(model, [name for name, _ in sources], folder)
    check_left_over(model, conversion, folder)


def check_missing(
    model: nn.Module, conversion: Conversion, gathered: Gathered, folder: Path, tied: set[str]
) -> None:
    """Every weight of the model is on disk. tied: names that share another's weight."""
    made = {
        m for target, sources in gathered.items() for m in conversion.made_by(target, sources[0][1])
    }
    optional = [re.compile(p) for p in model._keys_to_ignore_on_load_missing or ()]
    missing = [
        name
        for name in conversion.state
        if name not in made and name not in tied and not any(p.search(name) for p in optional)
    ]
    if missing:
        raise DraftmillError(
            f"{folder}: lacks {len(missing)} weights that the model needs, {missing[0]} first; they would "
            "be random; complete the checkpoint."
        )


def check_sources(
    conversion: Conversion,
    converter: WeightConverter,
    target: str,
    sources: list[tuple[str, str | None]],
    folder: Path,
) -> None:
    """Every tensor that a converted weight is made of is there: each expert, each scale of a packed one."""
    counts = Counter(pattern for _, pattern in sources)
    packed = any(checkpoint_files.entry(folder, name)["dtype"] not in PLAIN for name, _ in sources)
    merged = conversion.stacks(sources[0][1])
    expected = conversion.state[target].shape[0] if merged else 1
    for pattern in converter.source_patterns:
        if OPTIONAL in pattern or ("scale" in pattern and not packed):
            continue
        if counts[pattern] != expected and (merged or not counts[pattern]):
            raise DraftmillError(
                f"{folder}: holds {counts[pattern]} tensors of the kind {pattern} for {target}, expected "
                f"{expected}{', one per expert' if merged else ''}; complete the checkpoint, or mend "
                "config.json."
            )


def check_shapes(
    conversion: Conversion, target: str, sources: list[tuple[str, str | None]], folder: Path
) -> None:
    """Tensors to be stacked have one shape; what nobody packed has the model's number of values."""
    entries = {name: checkpoint_files.entry(folder, name) for name, _ in sources}
    shapes: dict[str | None, tuple[str, list[int]]] = {}
    for name, pattern in sources if conversion.stacks(sources[0][1]) else ():
        first, shape = shapes.setdefault(pattern, (name, entries[name]["shape"]))
        if entries[name]["shape"] != shape:
            raise DraftmillError(
                f"{folder}: {name} has shape {tuple(entries[name]['shape'])}, but {first}, its like, has "
                f"{tuple(shape)}; one of them is damaged; download the checkpoint again."
            )
    name, pattern = sources[0]
    check_dtype(conversion, target, sources[0], entries[name]["dtype"], folder)
    wanted = tuple(conversion.state[target].shape)
    if len(sources) == 1 and len(conversion.made_by(target, pattern)) == 1:
        found = tuple(entries[name]["shape"])
        fits = found == wanted or (pattern is not None and sorted(found) == sorted(wanted))
    elif all(e["dtype"] in PLAIN for e in entries.values()):
        made = conversion.made_by(target, pattern)
        found = (sum(prod(e["shape"]) for e in entries.values()),)
        fits = found[0] == sum(prod(conversion.state[m].shape) for m in made)
    else:
        return  # packed: the dequantiser checks it
    if not fits:
        raise DraftmillError(
            f"{folder}: {name} has shape {tuple(entries[name]['shape'])}, which does not make the model's "
            f"{target} {wanted}; the weights belong to another configuration."
        )


def check_scales(model: nn.Module, names: list[str], folder: Path) -> None:
    """Every FP8 weight [..., out, in] has one scale per block, the last block of a row or column perhaps
    cut (fp8_blocks.py); experts stored as one tensor have their own blocks each."""
    block = (quantisation(model.config) or {}).get("weight_block_size")
    for name in names if block else ():
        scale = f"{name}_scale_inv"
        if scale not in names:
            continue
        sizes = checkpoint_files.entry(folder, name)["shape"]
        found = checkpoint_files.entry(folder, scale)["shape"]
        blocks = [*[1] * len(sizes), *block][len(block) :]  # of the last two dimensions
        wanted = [-(-size // one) for size, one in zip(sizes, blocks, strict=True)]
        if found != wanted:
            raise DraftmillError(
                f"{folder}: {name} has shape {tuple(sizes)} and scales of shape {tuple(found)}; expected are "
                f"{tuple(wanted)}, one per block of {tuple(block)} (weight_block_size); download the "
                "checkpoint again, or mend config.json."
            )


def check_dtype(
    conversion: Conversion, target: str, source: tuple[str, str | None], dtype: str, folder: Path
) -> None:
    """Packed weights, where no quantiser unpacks them, would be taken for plain numbers."""
    name, pattern = source
    converter = conversion.by_source.get(pattern)
    unpacked = converter is not None and any("scale" in p for p in converter.source_patterns)
    weight = conversion.state[target]
    expected = weight.is_floating_point() and weight.itemsize > 1  # else the quantiser's own
    if dtype not in PLAIN and expected and not unpacked:
        raise DraftmillError(
            f"{folder}: {name} is stored as {dtype}, but config.json names no quantisation that unpacks it "
            f"(expected {', '.join(PLAIN)}); take the config.json that belongs to these weights."
        )


def check_left_over(model: nn.Module, conversion: Conversion, folder: Path) -> None:
    """No tensor in a layer, embedding, norm or head that the model does not know: it would be left out."""
    layers = f"{path_of(model, decoder_layers(model))}."
    modules = (model.get_input_embeddings(), final_norm(model), output_head(model))
    parts = tuple(f"{path_of(model, module)}." for module in modules)
    last = len(decoder_layers(model)) - 1
    ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    known, beyond = set(), defaultdict(dict)
    for name in checkpoint_files.weight_map(folder):
        target = conversion.target_of(name)[0]
        number, _, rest = target.removeprefix(layers).partition(".")
        inside = target.startswith(layers) and number.isdigit()
        if inside and int(number) > last:
            beyond[int(number)][rest] = name
        elif target in conversion.state:
            known |= {rest} if inside else set()
        elif (inside or target.startswith(parts)) and not (
            HARMLESS.search(name) or any(p.search(target) for p in ignored)
        ):
            raise DraftmillError(
                f"{folder}: holds {name}, which the model of config.json does not have, so it would be left "
                "out; mend config.json (a bias, a norm or experts that it says nothing of), or take the "
                "tensor out."
            )
    for number, names in beyond.items():
        if names.keys() <= known:  # one for multi-token prediction has projections of its own
            raise DraftmillError(
                f"{folder}: holds {next(iter(names.values()))} of a decoder layer {number}, but config.json "
                f"counts {last + 1} layers, 0 to {last}; mend num_hidden_layers, or take the layer out."
            )
