"""compressed-tensors, written by llm-compressor: groups of modules, each with its own weight format.

``float-quantized`` and ``naive-quantized`` in FP8, ``int-quantized`` in int8: ``weight`` and ``weight_scale``, in the
model's dtype mostly; ``pack-quantized`` in 4 and 8 bits; ``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized``. Scales
and zero points of activations are not used: see docs/decisions/0019-fp8-activations.md and 0020-integer-activations.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from specserve_kernels import Numbers
from torch import Tensor

from specserve.layers.formats.float4 import MXFP4, NVFP4
from specserve.layers.formats.fp8 import (
    ACTIVATION_SCALES,
    KV_SCALES,
    PER_OUTPUT,
    PER_TENSOR,
    Fp8Layout,
    block_of,
)
from specserve.layers.formats.pack_quantized import PackQuantizedLayout
from specserve.layers.formats.stored import (
    ExcludedError,
    Layout,
    StoredWeights,
    check_left_out,
    full_name,
    matches,
    modules_with,
    moved,
    one_of,
    stored_weights,
    texts,
)
from specserve.layers.formats.words import group_of, scales_of
from specserve.layers.weights import Dtypes

T = TypeVar("T")
_FORMATS = (
    "float-quantized",
    "naive-quantized",
    "int-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
_ORDERS = (True, False, "group", "dynamic", "weight", "static")
_STATUS = ("compressed", "frozen")
_INT8, _INT4, _FLOAT8 = {"strategy": "channel"}, {"num_bits": 4, "group_size": 128}, {"type": "float"}
_NVFP4 = {**_FLOAT8, "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
_MXFP4 = {**_FLOAT8, "num_bits": 4, "strategy": "group", "group_size": 32}
_FLOATS4 = (
    (("tensor_group", 16), "nvfp4-pack-quantized", NVFP4),
    (("group", 32), "mxfp4-pack-quantized", MXFP4),
)
"""Strategy and group, format, and layout of 4-bit floats."""
_PRESETS: dict[str, dict[str, Any] | None] = {
    "UNQUANTIZED": None,
    "W8A16": _INT8,
    "W8A8": _INT8,
    "INT8": _INT8,
    "W4A16": _INT4,
    "W4A8": _INT4,
    "W4A16_ASYM": {**_INT4, "symmetric": False},
    "FP8": {**_FLOAT8, "strategy": "tensor"},
    "FP8_DYNAMIC": {**_FLOAT8, "strategy": "channel"},
    "FP8_BLOCK": {**_FLOAT8, "strategy": "block", "block_structure": [128, 128]},
    "NVFP4": _NVFP4,
    "NVFP4A16": _NVFP4,
    "MXFP4": _MXFP4,
    "MXFP4A16": _MXFP4,
}
"""Weights of groups that are written as ``{preset: targets}``."""
_BLOCK = re.compile(r"(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class Int8Layout:
    """``weight`` int8 ``[O, I]`` and ``weight_scale`` ``[O, 1]``, or a single scale if ``per_tensor``."""

    per_tensor: bool
    split: ClassVar[int] = 1

    @property
    def words(self) -> str:
        return f"int8 with a scale {'a tensor' if self.per_tensor else 'an output'}"

    def tensors(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        scale = torch.empty(() if self.per_tensor else (outputs, 1), dtype=torch.float32)
        return {"weight": torch.empty(outputs, inputs, dtype=torch.int8), "weight_scale": scale}

    def fitted(self, outputs: int, inputs: int) -> Int8Layout:
        return self

    def numbers(self, stored: Mapping[str, Tensor], device: torch.device) -> Numbers:
        weight_OI = moved(stored["weight"], device)
        scale = moved(stored["weight_scale"], device, torch.float32)
        return Numbers(weight_OI, scale.expand(len(weight_OI), 1))


@dataclass(frozen=True, slots=True)
class _Group:
    where: str
    targets: list[str]
    fields: Mapping[str, Any]

    def layout(self) -> Layout:
        """Return the layout of its weights. Raises ValueError for one that no kernel supports."""
        kept_as, weights = one_of(self.fields, "format", _FORMATS), self.fields["weights"]
        if not isinstance(weights, Mapping):
            raise ValueError(f"{self.where}.weights must be an object, found {weights!r}")
        try:
            return _layout(weights, kept_as)
        except ValueError as error:
            words = str(error).removeprefix("quantization_config: ")
            raise ValueError(f"{self.where}.weights: {words}") from None


def read(config: Mapping[str, Any], files: Dtypes) -> StoredWeights:
    """Read ``quant_method: compressed-tensors``."""
    one_of(config, "format", _FORMATS)
    one_of(config, "quantization_status", _STATUS)
    sparse = config.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        raise ValueError(
            f"quantization_config: sparsity_config must be dense, found {sparse.get('format')!r}"
        )
    for field in ("transform_config", "transforms_config"):
        if config.get(field):
            raise ValueError(f"quantization_config: {field} must be empty: rotations are not applied")
    given = config.get("config_groups")
    if not isinstance(given, Mapping) or not (given or config.get("kv_cache_scheme")):
        raise ValueError(f"quantization_config: config_groups must be an object of groups, found {given!r}")
    groups = [_group(config, name, fields) for name, fields in given.items()]
    groups = [group for group in groups if group.fields.get("weights") is not None]
    modules = modules_with(files, "weight_scale")
    left = _best(dict.fromkeys(texts(config, "ignore"), True))
    check_left_out(modules, "ignore", lambda module: left(module) is not None)
    layouts, of = dict[str, Layout](), dict[str, _Group]()
    for group in groups:
        of |= {target: group for target in group.targets if target not in of}
    best = _best(of)
    for module in modules:
        if (found := best(name := full_name(module))) is None:
            raise ExcludedError(f"no group of config_groups has {name}, which the files hold quantized")
        layouts[module] = found.layout()
    for module, layout in layouts.items():
        if isinstance(layout, PackQuantizedLayout):
            indexed, scales = f"{module}.weight_g_idx" in files, scales_of(files, f"{module}.weight_scale")
            if layout.indexed and not indexed:
                raise ValueError(
                    f"quantization_config: actorder is group, but the files have no {module}.weight_g_idx"
                )
            layouts[module] = replace(layout, indexed=indexed, scales=scales)
    # Zero points of symmetric weights are 0, and shapes are known from the other tensors.
    unread = (*ACTIVATION_SCALES, "input_global_scale", *KV_SCALES, "weight_zero_point", "weight_shape")
    if not groups:
        return StoredWeights("compressed-tensors", {}, unread)
    return stored_weights("compressed-tensors", layouts, unread)


def _group(config: Mapping[str, Any], name: str, fields: object) -> _Group:
    where = f"quantization_config: config_groups.{name}"
    if name.upper() in _PRESETS and isinstance(fields, list):
        fields = {"targets": fields, "weights": _PRESETS[name.upper()]}
    if not isinstance(fields, Mapping):
        raise ValueError(
            f"{where} must be an object with targets and weights, or a list of targets named {', '.join(_PRESETS)}, "
            f"found {fields!r}"
        )
    kept_as = fields.get("format") or config.get("format")
    return _Group(where, texts(fields, "targets"), {**fields, "format": kept_as})


def _layout(weights: Mapping[str, Any], kept_as: str | None) -> Layout:
    """Return the layout of a group's weights. Raises ValueError for numbers that no kernel supports."""
    kind = weights.get("type", "int"), weights.get("num_bits", 8)
    strategy, symmetric = _strategy(weights), weights.get("symmetric", True) is True
    one_of(weights, "actorder", _ORDERS)
    in_words = (
        kept_as == "pack-quantized" and kind in (("int", 4), ("int", 8)) and strategy in ("group", "channel")
    )
    if kept_as is None and kind[0] == "int" and (kind[1] == 4 or strategy == "group"):
        raise ValueError("format must be pack-quantized for 4 bits and groups, found none")
    if not symmetric and not (in_words and kind[1] == 4):
        raise ValueError("symmetric must be true, except for 4-bit pack-quantized weights")
    if in_words:
        ordered = weights.get("actorder") in (True, "group")
        return PackQuantizedLayout(
            kind[1], group_of(weights) if strategy == "group" else 0, symmetric, ordered
        )
    grouped = kind, strategy, weights.get("group_size")
    for how, packing, floats in _FLOATS4:
        if grouped == (("float", 4), *how) and kept_as in (None, "mixed-precision", packing):
            return floats
    if kind == ("float", 8) and strategy == "block":
        return Fp8Layout("weight_scale", _block(weights.get("block_structure")))
    if kind == ("float", 8) and strategy in ("tensor", "channel"):
        return Fp8Layout("weight_scale", PER_TENSOR if strategy == "tensor" else PER_OUTPUT)
    if kind == ("int", 8) and strategy in ("tensor", "channel") and kept_as != "pack-quantized":
        return Int8Layout(strategy == "tensor")
    raise ValueError(
        f"type {kind[0]} of {kind[1]} bits by {strategy} is not supported; accepted are float of 8 bits by tensor, "
        "channel or block, int of 8 bits by tensor or channel, pack-quantized int of 4 or 8 bits by group or channel, "
        "and float of 4 bits by tensor_group of 16 (nvfp4-pack-quantized) or group of 32 (mxfp4-pack-quantized)"
    )


def _strategy(weights: Mapping[str, Any]) -> str:
    if (given := weights.get("strategy")) is not None:
        return str(given)
    size = weights.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _block(given: object) -> tuple[int, int]:
    if isinstance(given, str) and (found := _BLOCK.fullmatch(given)):
        given = [int(found[1]), int(found[2])]
    return block_of(given, "block_structure")


def _best(of: Mapping[str, T]) -> Callable[[str], T | None]:
    """Return what finds the value of the target that matches a module best: its name, else a pattern, else its class.
    There may be a hundred thousand modules, each by its name."""
    patterns = [target for target in of if target.startswith("re:")]

    def find(module: str) -> T | None:
        if module in of:
            return of[module]
        found = [of[target] for target in patterns if matches(target.removeprefix("re:"), module)]
        return found[0] if found else of.get("Embedding" if "embed_tokens" in module else "Linear")

    return find
