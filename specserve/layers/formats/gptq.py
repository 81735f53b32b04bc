"""4-bit and 8-bit weights as stored by AutoGPTQ and GPTQModel: ``quant_method: gptq``.

``qweight`` int32 ``[I / 8, O]`` packs eight inputs (four in 8 bits), ``qzeros`` int32 ``[G, O / 8]`` eight outputs,
``scales`` float16 ``[G, O]``, and ``g_idx`` int32 ``[I]``, which may be absent, is the group of each input. A weight is
``(q - zero) * scale``; ``checkpoint_format: gptq``, the default, stores the zero less one, ``gptq_v2`` as it is. With
``sym`` the zero is half of the range, and ``qzeros`` may be absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from specserve_kernels import Numbers
from torch import Tensor

from specserve.layers.formats.stored import (
    LEAST_GROUP,
    StoredWeights,
    check_cuts,
    check_left_out,
    full_name,
    matches,
    modules_with,
    moved,
    objects,
    one_of,
    smaller_groups,
    stored_weights,
    text_name,
    texts,
)
from specserve.layers.formats.words import (
    bits_of,
    group_of,
    index,
    int32,
    numbers_of,
    packed_size,
    scales_of,
    unpack_words,
    words_of,
)
from specserve.layers.weights import Dtypes

_LESS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """``less``: what is missing from the file's zero points, None if the configuration does not say. ``indexed``: it
    has a ``g_idx``. ``biased``: it has a bias; older tools always write one, zeros if the model has none. ``zeros``: it
    has ``qzeros``, which symmetric weights do not need. ``scales``: their dtype."""

    bits: int
    group: int
    symmetric: bool
    less: int | None
    indexed: bool
    biased: bool
    zeros: bool = True
    scales: torch.dtype = torch.float16
    split: int = 1

    @property
    def words(self) -> str:
        return words_of(self.bits, self.group, zeros=not self.symmetric)

    def tensors(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        groups = -(-inputs // (self.group or inputs))
        found = {
            "qweight": int32(packed_size(inputs, self.bits, "inputs"), outputs),
            "scales": torch.empty(groups, outputs, dtype=self.scales),
        }
        if self.zeros:
            found["qzeros"] = int32(groups, packed_size(outputs, self.bits, "outputs"))
        if self.indexed:
            found["g_idx"] = index(inputs)
        if self.biased:
            found["bias"] = torch.empty(outputs)
        return found

    def fitted(self, outputs: int, inputs: int) -> GptqLayout:
        word = 32 // self.bits
        check_cuts(outputs, inputs, word if self.zeros else 1, LEAST_GROUP if self.group else word)
        group, split = smaller_groups(self.group, inputs)
        return replace(self, group=group, split=self.split * split)

    def numbers(self, stored: Mapping[str, Tensor], device: torch.device) -> Numbers:
        values_OI, zero_OG = unpack_words(moved(stored["qweight"], device).T, self.bits), None
        if self.zeros:
            zero_OG = self._zeros(unpack_words(moved(stored["qzeros"], device), self.bits).T)
        scale_OG, index_I = moved(stored["scales"], device, self.scales).T, stored.get("g_idx")
        return numbers_of(values_OI, scale_OG, zero_OG, self.bits, self.group, index_I)

    def _zeros(self, stored_OG: Tensor) -> Tensor | None:
        """Return the zero points, None for symmetric weights. Raises ValueError if theirs are not half of their
        range."""
        if not self.symmetric:
            less = 1 if self.less is None else self.less
            return torch.bitwise_and(stored_OG + less, 2**self.bits - 1)
        # Either format's: sym decides, and some files have those of the format that they do not name.
        accepted = [2 ** (self.bits - 1) - less for less in _LESS.values()]
        if not stored_OG.is_meta and not any((stored_OG == each).all() for each in accepted):
            words = " or ".join(map(str, accepted))
            raise ValueError(f"qzeros must all be {words}, because sym is true, found others")
        return None


def read(config: Mapping[str, Any], files: Dtypes) -> StoredWeights:
    """Read ``quant_method: gptq``."""
    for field in ("checkpoint_format", "format"):
        one_of(config, field, tuple(_LESS))
    one_of(config, "is_marlin_format", (False,))
    one_of(config, "pack_dtype", ("int32",))
    modules = modules_with(files, "qweight")
    check_left_out(modules, "modules_in_block_to_quantize", _outside(config))
    overrides = _overrides(config)
    check_left_out(modules, "dynamic", lambda module: overrides(module) is None)
    layouts = {
        module: _layout(config, overrides(full_name(module)) or {}, module, files) for module in modules
    }
    return stored_weights("gptq", layouts, ())


def _layout(
    config: Mapping[str, Any], overrides: Mapping[str, Any], module: str, files: Dtypes
) -> GptqLayout:
    """Return a module's layout. Raises ValueError naming a field that no kernel supports."""
    fields = {**config, **overrides}
    bits, sym = bits_of(fields, "bits", (4, 8)), one_of(fields, "sym", (True, False))
    symmetric = sym is True or (sym is None and bits == 8)  # 4 bits without it: by the file's zero points
    if bits == 8 and not symmetric:
        raise ValueError("quantization_config: sym must be True where bits is 8")
    indexed = f"{module}.g_idx" in files
    if one_of(fields, "desc_act", (True, False)) and not indexed:
        raise ValueError(f"quantization_config: desc_act is True, but the files have no {module}.g_idx")
    kept_as = config.get("checkpoint_format") or config.get("format")
    less = _LESS[kept_as] if kept_as else None
    zeros, biased = not symmetric or f"{module}.qzeros" in files, f"{module}.bias" in files
    scales = scales_of(files, f"{module}.scales")
    return GptqLayout(bits, group_of(fields), symmetric, less, indexed, biased, zeros, scales)


def _overrides(config: Mapping[str, Any]) -> Callable[[str], Mapping[str, Any] | None]:
    """Return what finds the overrides of the first pattern of ``dynamic`` that matches a module; None if that excludes
    it."""
    given = [(text_name(pattern), fields) for pattern, fields in objects(config, "dynamic").items()]

    @cache
    def find(module: str) -> Mapping[str, Any] | None:
        for pattern, fields in given:
            if matches(pattern.removeprefix("-:").removeprefix("+:"), module):
                return None if pattern.startswith("-:") else fields
        return {}

    return find


def _outside(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return whether a layer's module is in none of the lists of quantized modules, if there are any."""
    field = "modules_in_block_to_quantize"
    given = config.get(field) or []
    nested = isinstance(given, list) and all(isinstance(each, list) for each in given)
    listed = (
        [name for each in given for name in texts({field: each}, field)] if nested else texts(config, field)
    )
    ends = tuple(f".{name}" for name in listed)
    return lambda module: bool(ends) and ".layers." in module and not module.endswith(ends)
