"""Which tensor on disk becomes which parameter of the model: transformers' own key conversion.

Names on disk differ from those of the modules (language_model.model.* in Kimi-K2.5, one key per expert in
most mixtures of experts). The rules are transformers'; here they are applied to names alone, once per
kind of name instead of once per name, so that 200,000 keys take a second.
"""

import re
from collections import defaultdict
from collections.abc import Iterable

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
PLACEHOLDERS = (7000003, 7000013, 7000027, 7000031, 7000043)  # numbers that stand in no name


class Conversion:
    """The renaming rules of one model."""

    def __init__(self, model: nn.Module, quantizer=None):
        self.rules = get_model_conversion_mapping(model, hf_quantizer=quantizer)
        self.renamings = [rule for rule in self.rules if isinstance(rule, WeightRenaming)]
        self.converters = [rule for rule in self.rules if isinstance(rule, WeightConverter)]
        self.by_source = {s: c for c in self.converters for s in c.source_patterns}
        self.prefix = model.base_model_prefix
        self.state = model.state_dict()
        self._kinds: dict[str, tuple[str, str | None] | None] = {}

    def target_of(self, name: str) -> tuple[str, str | None]:
        """The model's name for a name on disk, and the source pattern of its converter, if it has one."""
        numbers = NUMBER.findall(name)
        kind = NUMBER.sub("#", name)
        if len(numbers) > len(PLACEHOLDERS):
            return self._directly(name)
        if kind not in self._kinds:
            self._kinds[kind] = self._general(kind, numbers, name)
        found = self._kinds[kind]
        if found is None:
            return self._directly(name)
        target, pattern = found
        for placeholder, number in zip(PLACEHOLDERS, numbers, strict=False):
            target = target.replace(str(placeholder), number)
        return self._prefixed(target, name), pattern

    def unnumbered(self, names: Iterable[str]) -> list[str]:
        """The names that may become a parameter without a number in its name: no layer's, no expert's."""
        kinds = {name: NUMBER.sub("#", name) for name in names}
        return [
            n for n, kind in kinds.items() if "#" not in kind or not self._keeps_numbers(n, kind)
        ]

    def _keeps_numbers(self, name: str, kind: str) -> bool:
        if kind not in self._kinds:
            self.target_of(name)
        found = self._kinds.get(kind)
        return found is not None and any(str(p) in found[0] for p in PLACEHOLDERS)

    def _general(self, kind: str, numbers: list[str], name: str) -> tuple[str, str | None] | None:
        """The rename of a kind of name; None where its numbers matter to the rules."""
        holders = iter(map(str, PLACEHOLDERS))
        text = re.sub("#", lambda _: next(holders), kind)
        target, pattern = rename_source_key(text, self.renamings, self.converters)
        filled = target
        for placeholder, number in zip(PLACEHOLDERS, numbers, strict=False):
            filled = filled.replace(str(placeholder), number)
        direct = rename_source_key(name, self.renamings, self.converters)
        return (target, pattern) if (filled, pattern) == direct else None

    def _directly(self, name: str) -> tuple[str, str | None]:
        target, pattern = rename_source_key(name, self.renamings, self.converters)
        return self._prefixed(target, name), pattern

    def _prefixed(self, target: str, name: str) -> str:
        """With or without the base model's prefix, as the model has it (as transformers decides)."""
        found, _ = rename_source_key(target, [], [], self.prefix, self.state)
        if found not in self.state and name in self.state:
            return name
        return found

    def gathered(self, names: Iterable[str]) -> dict[str, list[tuple[str, str | None]]]:
        """parameter -> the tensors on disk that make it, with their source patterns; names that the model
        does not know are left out (multi-token-prediction layers, for example)."""
        found: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
        for name in names:
            target, pattern = self.target_of(name)
            if target in self.state:
                found[target].append((name, pattern))
        return dict(found)

    def made_by(self, target: str, pattern: str | None) -> list[str]:
        """All parameters that the converter behind `target` makes (one fused tensor may be split)."""
        if pattern is None:
            return [target]
        first, *others = self.by_source[pattern].target_patterns
        return [target, *(target.replace(first, other) for other in others)]

    def stacks(self, pattern: str | None) -> bool:
        """Whether the converter behind a source pattern stacks one tensor per expert."""
        converter = self.by_source.get(pattern)
        operations = converter.operations if converter else ()
        return any(isinstance(o, MergeModulelist) for o in operations)
