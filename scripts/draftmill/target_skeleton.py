"""The target on the meta device, ready to take any part of its weights from disk.

It is made as transformers' from_pretrained makes it (dtype context, quantiser, conversion rules), so that
parts loaded here have the bits that a whole load gives them.
"""

import copy
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import torch
from compressed_tensors.compressors.base import decompress_module
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig
from transformers.core_model_loading import (
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    set_param_for_module,
)
from transformers.modeling_utils import LoadStateDictConfig, LoadStateDictInfo
from transformers.monkey_patching import patch_output_recorders
from transformers.quantizers.auto import get_hf_quantizer
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

from draftmill import checkpoint_files, fp8_blocks
from draftmill.checkpoint_names import Conversion
from draftmill.errors import DraftmillError
from draftmill.freed_memory import give_back
from draftmill.target_config import dequantising, quantisation
from draftmill.target_structure import decoder_layers, model_of, path_of, text_decoder

fp8_blocks.install()
PARTS = (
    16  # a fused expert tensor is filled in so many parts: its sources never stand whole beside it
)


def blueprint(manifest: dict, dtype: torch.dtype) -> tuple[type, PretrainedConfig]:
    """The model's class and its configuration in this dtype; in bf16, and dequantising to it, where it is
    quantised: so the weights have the values that are served."""
    model = model_of(manifest)
    config = dequantising(model.config, path_of(model, text_decoder(model)))
    dtype = dtype if quantisation(config) is None else torch.bfloat16
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    return type(model), config


def widen(
    module: nn.Module, declared: torch.dtype, dtypes: dict[str, torch.dtype], path: str = ""
) -> None:
    """Casts weights that a dequantiser left in bf16 to what a float32 target declares.

    dtypes: parameter -> dtype; those that it does not know were packed. path: of the module in the model.
    """
    for name, weight in module.named_parameters():
        wanted = dtypes.get(path + name, declared)
        if weight.is_floating_point() and not weight.is_meta and weight.dtype != wanted:
            weight.data = weight.data.to(wanted)


def family_dtypes(
    model: nn.Module, dtype: torch.dtype, declared: torch.dtype
) -> dict[str, torch.dtype]:
    """parameter -> the dtype that the family gives it in a model of the declared one.

    model: on the meta device, made under `dtype`.
    """
    plan = model._get_dtype_plan(dtype)
    kept = build_glob_alternation(list(plan))[0] if plan else None
    found = {name: p.dtype for name, p in model.named_parameters()}
    packed = {dtype, torch.float8_e4m3fn, torch.float8_e5m2}  # what becomes of the declared dtype
    return {
        n: torch.float32 if kept and kept.search(n) else declared if d in packed else d
        for n, d in found.items()
    }


class Skeleton:
    """A model without weights, and the means to load some and to drop them again.

    dtype: of the loaded weights; a quantised checkpoint is dequantised to bf16, whatever it is, and its
    weights are to be widened after loading. device: where they go.
    """

    def __init__(self, manifest: dict, dtype: torch.dtype, device: str):
        self.folder = Path(manifest["checkpoint"])
        kind, config = blueprint(manifest, dtype)
        declared, dtype = dtype, config.dtype
        self.device_map = {"": device}
        self.quantizer, config, _ = get_hf_quantizer(config, None, self.device_map, True, {})
        quantised = self.quantizer is not None
        with ExitStack() as stack:
            for context in kind.get_init_context(dtype, quantised, False, None):
                stack.enter_context(context)
            self.model = kind(config)
            patch_output_recorders(self.model)
            if quantised:
                self.quantizer.preprocess_model(
                    model=self.model,
                    dtype=dtype,
                    device_map=self.device_map,
                    checkpoint_files=None,
                    use_kernels=False,
                )
                if isinstance(self.quantizer, CompressedTensorsHfQuantizer):
                    # it would unpack the whole model at its first pass; here each layer is, as it comes
                    self.quantizer.compressor.remove_decompression_hook(self.model)
        self.model.eval().requires_grad_(False)
        self.conversion = Conversion(self.model, self.quantizer)
        self.load_config = LoadStateDictConfig(
            device_map=self.device_map,
            dtype=dtype,
            dtype_plan=self.model._get_dtype_plan(dtype),
            hf_quantizer=self.quantizer,
            weight_mapping=self.conversion.rules,
        )
        self.dtypes = family_dtypes(self.model, dtype, declared)
        self.gathered = self.conversion.gathered(checkpoint_files.weight_map(self.folder))
        self.layers_path = f"{path_of(self.model, decoder_layers(self.model))}."

    def of_layer(self, index: int) -> dict[str, list[tuple[str, str | None]]]:
        """parameter -> its tensors on disk, of one decoder layer."""
        prefix = f"{self.layers_path}{index}."
        return {k: v for k, v in self.gathered.items() if k.startswith(prefix)}

    def of_the_rest(self) -> dict[str, list[tuple[str, str | None]]]:
        """The same for what text needs beside the layers: embedding, norm, head."""
        inside = (
            f"{path_of(self.model, text_decoder(self.model))}.",
            f"{path_of(self.model, self.model.get_input_embeddings())}.",
            f"{path_of(self.model, self.model.get_output_embeddings())}.",
        )
        return {
            k: v
            for k, v in self.gathered.items()
            if k.startswith(inside) and not k.startswith(self.layers_path)
        }

    def load(self, wanted: dict[str, list[tuple[str, str | None]]]) -> None:
        """Reads parameters, converts and dequantises them as transformers does."""
        by_parts = {k: v for k, v in wanted.items() if self._in_parts(k, v)}
        at_once = [name for k, v in wanted.items() if k not in by_parts for name, _ in v]
        with Slices(self.folder) as slices:
            found, _ = convert_and_load_state_dict_in_model(
                self.model, {name: slices[name] for name in at_once}, self.load_config
            )
        if found.mismatched_keys or found.conversion_errors:
            reason = next(iter(found.mismatched_keys or found.conversion_errors.items()))
            raise DraftmillError(f"{self.folder}: weights do not fit the model: {reason}.")
        for target, sources in by_parts.items():
            self._load_in_parts(target, sources)
        if isinstance(self.quantizer, CompressedTensorsHfQuantizer):
            for path in sorted({target.rpartition(".")[0] for target in wanted}):
                decompress_module(self.model.get_submodule(path))

    def _in_parts(self, target: str, sources: list[tuple[str, str | None]]) -> bool:
        if not self.conversion.stacks(sources[0][1]):
            return False
        experts = self.conversion.state[target].shape[0]
        even = len(sources) == experts * len({pattern for _, pattern in sources})
        return even and len(self.conversion.made_by(target, sources[0][1])) == 1

    def _load_in_parts(self, target: str, sources: list[tuple[str, str | None]]) -> None:
        """A tensor of all experts, some experts at a time."""
        by_pattern: dict[str, list[str]] = defaultdict(list)
        for name, pattern in sorted(sources, key=lambda s: dot_natural_key(s[0])):
            by_pattern[pattern].append(name)
        shape = self.conversion.state[target].shape
        step = max(1, shape[0] // PARTS)
        info = LoadStateDictInfo(set(), set(), set(), [], {}, set())
        whole = None
        for first in range(0, shape[0], step):
            converter = copy.deepcopy(self.conversion.by_source[sources[0][1]])
            with Slices(self.folder) as slices:
                for pattern, names in by_pattern.items():
                    for name in names[first : first + step]:
                        tensor = self._as_stored(slices[name], target)
                        converter.add_tensor(target, name, pattern, lambda tensor=tensor: tensor)
                made = converter.convert(
                    target,
                    model=self.model,
                    config=self.model.config,
                    hf_quantizer=self.quantizer,
                    loading_info=info,
                )
            part = next(iter(made.values()))
            part = part[0] if isinstance(part, list) else part
            if whole is None:
                whole = torch.empty(shape, dtype=part.dtype, device=part.device)
            if info.conversion_errors or part.shape[1:] != shape[1:]:
                raise DraftmillError(
                    f"{self.folder}: the experts of {target} do not fit the model (shape "
                    f"{tuple(part.shape)}, expected {tuple(shape)}; {info.conversion_errors})."
                )
            whole[first : first + step] = part
            del part, made, converter
            give_back()
        set_param_for_module(self.model, target, whole, info, self.quantizer)

    def _as_stored(self, piece, target: str) -> torch.Tensor:
        """A source tensor on its device: in its own dtype where a quantiser unpacks it, else in the
        parameter's."""
        dtype = None if self.quantizer else self.conversion.state[target].dtype
        return piece[...].to(device=self.device_map[""], dtype=dtype)


class Slices:
    """Tensors of a checkpoint, opened lazily; the files are closed, and unmapped, on leaving."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.stack = ExitStack()
        self.files: dict = {}

    def __enter__(self) -> "Slices":
        return self

    def __exit__(self, *error) -> None:
        self.stack.close()

    def __getitem__(self, name: str):
        file = checkpoint_files.weight_map(self.folder)[name]
        if file not in self.files:
            self.files[file] = self.stack.enter_context(safe_open(self.folder / file, "pt"))
        return self.files[file].get_slice(name)
