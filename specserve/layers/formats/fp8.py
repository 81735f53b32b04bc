"""FP8 (e4m3) weights as stored by Hugging Face's ``fp8`` and ``fbgemm_fp8``: DeepSeek, Qwen, Meta, AutoFP8.

``weight`` float8_e4m3fn ``[O, I]``, and a scale that multiplies it: a number for all (``weight_scale``,
``weight_scale_inv``), one for each output ``[O, 1]``, or one for each block ``[O / 128, I / 128]``, rounded up.
Scales of activations (``input_scale``, ``activation_scale``) are not used: see docs/decisions/0019-fp8-activations.md.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from specserve_kernels import FP8, Numbers
from torch import Tensor

from specserve.layers.formats.stored import (
    Layout,
    StoredWeights,
    check_cuts,
    check_left_out,
    modules_with,
    moved,
    one_of,
    smaller_groups,
    stored_weights,
    texts,
)

ACTIVATION_SCALES = ("input_scale", "activation_scale", "input_scale_ub", "input_zero_point", "output_scale")
KV_SCALES = ("k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale")
BLOCK_INPUTS = (32, 64, 128, 256, 512)  # numbers of inputs that the kernels support


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """``scale``: the tensor's name. ``block``: outputs and inputs that share a scale; 0: all of them."""

    scale: str
    block: tuple[int, int]
    split: int = 1

    @property
    def group(self) -> int:
        return self.block[1]

    @property
    def words(self) -> str:
        if self.block == (0, 0):
            return "FP8 with a scale a tensor"
        return "FP8 with a scale an output" if self.block == (1, 0) else f"FP8 in blocks of {self.block}"

    def tensors(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        rows, group = self.block
        shape = (-(-outputs // (rows or outputs)), -(-inputs // (group or inputs)))
        scale = torch.empty(shape if rows else (), dtype=torch.float32)
        return {"weight": torch.empty(outputs, inputs, dtype=FP8), self.scale: scale}

    def fitted(self, outputs: int, inputs: int) -> Fp8Layout:
        check_cuts(outputs, inputs, 1, min(BLOCK_INPUTS) if self.block[1] else 1)
        (rows, more), (group, also) = map(smaller_groups, self.block, (outputs, inputs))
        return replace(self, block=(rows, group), split=self.split * more * also)

    def numbers(self, stored: Mapping[str, Tensor], device: torch.device) -> Numbers:
        (rows, group), weight_OI = self.block, moved(stored["weight"], device)
        scale = moved(stored[self.scale], device, torch.float32)
        if not rows:
            return Numbers(weight_OI, scale.expand(len(weight_OI), 1))
        return Numbers(weight_OI, scale, None, group, rows)


PER_TENSOR, PER_OUTPUT = (0, 0), (1, 0)


def read(config: Mapping[str, Any], names: Collection[str]) -> StoredWeights:
    """Read ``quant_method: fp8``."""
    one_of(config, "activation_scheme", ("static", "dynamic"))
    one_of(config, "fmt", ("e4m3", "e4m3fn", "float8_e4m3fn"))
    block = PER_TENSOR
    if (given := config.get("weight_block_size")) is not None:
        block = block_of(given, "weight_block_size")
    scale = "weight_scale_inv" if modules_with(names, "weight_scale_inv") else "weight_scale"
    return _read(config, names, Fp8Layout(scale, block), "fp8")


def read_fbgemm(config: Mapping[str, Any], names: Collection[str]) -> StoredWeights:
    """Read ``quant_method: fbgemm_fp8``."""
    return _read(config, names, Fp8Layout("weight_scale", PER_OUTPUT), "fbgemm_fp8")


def _read(
    config: Mapping[str, Any], names: Collection[str], layout: Fp8Layout, dialect: str
) -> StoredWeights:
    layouts: dict[str, Layout] = dict.fromkeys(modules_with(names, layout.scale), layout)
    for field in ("modules_to_not_convert", "ignored_layers"):
        check_left_out(layouts, field, named_by(texts(config, field)))
    return stored_weights(dialect, layouts, (*ACTIVATION_SCALES, *KV_SCALES))


def named_by(left: Collection[str], globs: Iterable[str] = ()) -> Callable[[str], bool]:
    """Return whether a list of modules contains one, one that it is in, or the last parts of its name, or one of
    ``globs`` matches it. There may be a hundred thousand modules, and a thousand in the list."""
    names, pattern = {*left}, re.compile("|".join(map(fnmatch.translate, globs)) or "(?!)")

    def named(module: str) -> bool:
        parts = module.split(".")
        ends = (".".join(end) for at in range(len(parts)) for end in (parts[: at + 1], parts[at:]))
        return not names.isdisjoint(ends) or pattern.match(module) is not None

    return named


def block_of(given: object, field: str) -> tuple[int, int]:
    """Return outputs and inputs of a block. Raises ValueError for anything else."""
    fits = isinstance(given, list) and len(given) == 2 and all(type(each) is int for each in given)
    if not fits or given[0] < 1 or given[1] not in BLOCK_INPUTS:  # type: ignore[index]
        raise ValueError(
            f"quantization_config: {field} must be a block's outputs and inputs, with inputs one of "
            f"{', '.join(map(str, BLOCK_INPUTS))}, found {given!r}"
        )
    return given[0], given[1]  # type: ignore[index]
