"""Forward passes of the target, by one of two backends that give the same bits.

resident: the whole model is in memory (on several GPUs where there are some). streamed: one decoder layer at a
time, so that a model far larger than the machine runs; the checkpoint is read once per call of `run`.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn

from draftmill import target_model
from draftmill.checkpoint_fit import check_fit
from draftmill.devices import best_device
from draftmill.dtype_policy import DTYPES, Ledger
from draftmill.errors import DraftmillError
from draftmill.freed_memory import give_back
from draftmill.lockstep import Lockstep
from draftmill.read_ahead import ReadAhead
from draftmill.target_skeleton import Skeleton, widen
from draftmill.target_structure import decoder_layers, path_of, text_decoder

BACKENDS = ("auto", "resident", "streamed")
KERNELS = 64  # kept by oneDNN in a streamed pass
ROOM = 0.7  # share of the free memory that a resident model may take
Pass = Callable[[nn.Module], Any]


class Resident:
    """The whole target in memory."""

    name, streams = "resident", False

    def __init__(self, manifest: dict, ledger: Ledger):
        began = time.monotonic()
        self.model = target_model.load(manifest, manifest["dtype"], ledger)
        self.seconds_loading = time.monotonic() - began

    def run(self, passes: Iterable[Pass]) -> Iterator[Any]:
        """The results of the passes, each made when it is asked for."""
        for one in passes:
            with torch.inference_mode():
                result = one(self.model)
            yield result


class Streamed:
    """The target with one decoder layer in memory at a time."""

    name, streams = "streamed", True

    def __init__(self, manifest: dict, ledger: Ledger):
        began = time.monotonic()
        # oneDNN keeps a kernel per shape, and the experts of a mixture see ever new ones: up to 200 MB
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS))
        self.ledger, self.dtype = ledger, manifest["dtype"]
        self.skeleton = Skeleton(manifest, DTYPES[manifest["dtype"]], best_device())
        self.model = self.skeleton.model
        self.layers = decoder_layers(self.model)
        self._load_the_rest()
        target_model.note_kept(ledger, self.skeleton.dtypes, self.dtype)
        self._widen_and_check(self.model)
        self.reader = ReadAhead(self.skeleton.folder)
        self.empty = [held(layer) for layer in self.layers]
        self.seconds_loading = time.monotonic() - began

    def _load_the_rest(self) -> None:
        skeleton, model = self.skeleton, self.model
        tied = set(getattr(model, "all_tied_weights_keys", {}))
        check_fit(model, skeleton.conversion, skeleton.gathered, skeleton.folder)
        skeleton.load(skeleton.of_the_rest())
        # as from_pretrained ends: buffers that are not stored, then shared weights
        model._move_missing_keys_from_meta_to_device(
            set(), skeleton.device_map, None, skeleton.quantizer
        )
        model._initialize_missing_keys(skeleton.quantizer is not None)
        model.tie_weights(
            missing_keys={n for n in tied if n not in skeleton.gathered}, recompute_mapping=False
        )
        inside = path_of(model, text_decoder(model))
        found = text_decoder(model).state_dict(prefix=f"{inside}.")
        self._refuse_missing(
            {n: t for n, t in found.items() if not n.startswith(skeleton.layers_path)}
        )

    def _refuse_missing(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.is_meta:
                raise DraftmillError(
                    f"{self.skeleton.folder}: {name} could not be loaded by itself, so this family needs the "
                    "resident backend."
                )

    def _widen_and_check(self, module: nn.Module, path: str = "") -> None:
        dtypes = self.skeleton.dtypes
        if self.skeleton.quantizer:
            widen(module, DTYPES[self.dtype], dtypes, path)
        target_model.check_dtypes(self.ledger, module, self.dtype, dtypes, path)

    def load(self, index: int) -> None:
        began = time.monotonic()
        layer, path = self.layers[index], f"{self.skeleton.layers_path}{index}."
        self.skeleton.load(self.skeleton.of_layer(index))
        self._refuse_missing(layer.state_dict(prefix=path))
        self._widen_and_check(layer, path)
        self.seconds_loading += time.monotonic() - began

    def free(self, index: int) -> None:
        put_back(self.layers[index], self.empty[index])
        give_back()

    def ahead(self, index: int) -> None:
        sources = self.skeleton.of_layer(index).values()
        self.reader.start([name for entry in sources for name, _ in entry])

    def run(self, passes: Iterable[Pass]) -> Iterator[Any]:
        """The results of the passes, after all of them have gone through every layer."""

        def bound(one: Pass) -> Callable[[], Any]:
            return lambda: one(self.model)

        lockstep = Lockstep(self.layers, self.load, self.free, self.ahead)
        before = kept_values(self.model)
        try:
            with torch.inference_mode():
                results = lockstep.run(bound(one) for one in passes)
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            raise DraftmillError(
                f"{self.skeleton.folder}: {type(self.model).__name__} asks for weights beside its text decoder "
                f"({error}); this family needs the resident backend."
            ) from error
        finally:
            lockstep.close()
        changed = before.keys() & {
            n for n, v in kept_values(self.model).items() if v != before.get(n)
        }
        if changed:
            raise DraftmillError(
                f"{self.skeleton.folder}: {type(self.model).__name__} changes itself while it runs "
                f"({sorted(changed)[0]}), which layers that come and go do not keep; this family needs the "
                "resident backend."
            )
        yield from results


def kept_values(model: nn.Module) -> dict[str, object]:
    """The flags and numbers that modules keep from pass to pass: RWKV notes there that it has rescaled its
    weights."""
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
    }


@dataclass(frozen=True)
class Held:
    """What a module holds: parameters, buffers, and whether it is compressed."""

    parameters: dict
    buffers: dict
    status: object


def held(layer: nn.Module) -> dict[str, Held]:
    """What a layer's modules hold now."""
    return {
        name: Held(
            dict(module._parameters),
            dict(module._buffers),
            getattr(module, "quantization_status", None),
        )
        for name, module in layer.named_modules()
    }


def put_back(layer: nn.Module, content: dict[str, Held]) -> None:
    """Gives a layer's modules back what they held."""
    for name, was in content.items():
        module = layer.get_submodule(name)
        for now, before in (
            (module._parameters, was.parameters),
            (module._buffers, was.buffers),
        ):
            now.clear()
            now.update(before)
        if was.status is not None:
            module.quantization_status = was.status


def open_target(manifest: dict, backend: str, ledger: Ledger) -> Resident | Streamed:
    """The backend by name; "auto" takes the resident one where the model fits.

    Both refuse a checkpoint that lacks a weight, and weights in another dtype than declared.
    """
    chosen = choose(manifest) if backend == "auto" else backend
    print(f"backend: {chosen}", flush=True)
    return {"resident": Resident, "streamed": Streamed}[chosen](manifest, ledger)


def choose(manifest: dict) -> str:
    """resident where the weights fit into ROOM of the free memory of the GPUs, or of the machine."""
    free = psutil.virtual_memory().available
    if torch.cuda.is_available():
        free = sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
    return "resident" if manifest["weight_bytes"] <= ROOM * free else "streamed"
