"""Random weights in place of a checkpoint's, for ``--load-format dummy``.

A number depends on the name of its tensor and its place in it alone. So every run, device and dtype has the same, and
a part of a tensor is that part of the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import log2, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from specserve_kernels import FP8
from torch import Tensor, nn

from specserve.layers.formats import read_format
from specserve.layers.formats.stored import ExcludedError, StoredProjection
from specserve.layers.ranks import Cut, whole_of
from specserve.layers.weights import Dtypes, Projection, WeightFormat
from specserve.models.tensor_files import Header, TensorFiles

if TYPE_CHECKING:
    from specserve.models.base import TargetModel

_CHUNK = 1 << 24  # numbers drawn at a time, which bounds the integers in memory
GOLDEN, MIX = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # of SplitMix64
_INDICES = ("g_idx", "weight_g_idx")
_ZEROS = {4: 0x77777777, 8: 0x7F7F7F7F}  # words of zero points, by bits: one less than half of the range
_GAINS = {"embed_tokens": 0.1, "down_proj": 3.0}
"""Factors of weights, without which texts repeat a token: the embedding's part of the last state is the last token's,
and attention's is nearly the mean of all tokens."""
_SPREAD = 0.05  # of norms' weights around 1, and of biases around 0
_QUANTIZED: Dtypes = {
    "qweight": None, "scales": torch.float16, "qzeros": None, "weight_scale": torch.bfloat16,
    "blocks": None, "weight_scale_2": torch.float32,
}  # fmt: skip
"""The tensors that a quantized module may have and that decide about its format; ``_INDICES`` are asked for by some."""


class RandomTensors(TensorFiles):
    """Has every tensor that a parameter asks for. ``shapes``: those that readers find. ``owner``: added to names, so
    that a draft is not its target."""

    verb = "drew"

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], owner: str = "") -> None:
        self.path, self.where = path, "random weights"
        self._shapes, self._owner = shapes, owner

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def names(self) -> list[str]:
        return list(self._shapes)

    def header(self, name: str) -> Header:
        self.file(name)
        return Header(self._shapes[name], torch.bfloat16)

    def file(self, name: str) -> Path:
        if name not in self._shapes:
            raise ValueError(f"{self.path} has no tensor {name}: {self.where} have no such part")
        return self.path / "config.json"

    def __getitem__(self, name: str) -> Tensor:
        """Return the offsets of a draft vocabulary, which then has the first ids."""
        return torch.zeros(self.header(name).shape, dtype=torch.int64)

    def check(self, name: str, target: Tensor, cut: Cut | None = None) -> None:
        """Accept every parameter."""

    def fill(self, name: str, target: Tensor, module: nn.Module, cut: Cut | None = None) -> Tensor:
        """Draw a tensor on the device of its module, so that outputs are about as large as inputs."""
        device = module.device if target.is_meta and isinstance(module, Projection) else target.device
        shape, dtype, (*path, kind) = target.shape, target.dtype, name.split(".")
        if kind in _INDICES:  # all negative: groups are contiguous
            return torch.full(shape, -1, dtype=dtype, device=device)
        gain = _GAINS.get(path[-1], 1.0) if path else 1.0
        spread = _SPREAD if len(shape) < 2 else gain * (cut or target).shape[-1] ** -0.5
        if isinstance(module, StoredProjection):
            bits: int = getattr(module.layout, "bits", 8)
            integers = getattr(module.layout, "deviation", 2**bits / sqrt(12))  # of what random bits mean
            if kind.endswith(("qzeros", "zero_point")):
                return torch.full(shape, _ZEROS[bits], dtype=dtype, device=device)
            if "scale" in kind:
                scale = gain * whole_of(module.inputs) ** -0.5 / integers
                if dtype == FP8:  # of groups: the tensor's is next to it
                    scale = 1.0
                elif not dtype.is_floating_point:  # of mxfp4
                    scale = round(log2(scale)) + 127
                scale = 1 / scale if "global" in kind else scale
                found = torch.full(shape, scale, dtype=dtype, device=device)
                if dtype.is_floating_point and dtype != FP8:
                    # Integers have a mean. Added up, it would grow from layer to layer until all tokens were alike.
                    place_N = _in_whole(torch.arange(found.numel(), device=device), shape, cut)
                    found.view(-1).mul_(1 - place_N % 2 * 2)
                return found
            spread = integers if dtype.itemsize == 1 else spread
        out = torch.empty(shape, dtype=dtype, device=device)
        return draw(self._owner + name, out, spread, len(shape) < 2 and kind != "bias", cut)


def draw(name: str, out: Tensor, spread: float, mean: float = 0.0, cut: Cut | None = None) -> Tensor:
    """Fill a contiguous tensor, the whole or a part: floats of a uniform distribution with this mean and standard
    deviation, integers of random bits. Return it."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    for number, part_N in enumerate(out.view(-1).split(_CHUNK)):
        start = number * _CHUNK
        place_N = _in_whole(torch.arange(start, start + len(part_N), device=out.device), out.shape, cut)
        bits_N = place_N.mul_(signed(GOLDEN)).add_(key)
        for shift, factor in MIX:
            bits_N.bitwise_xor_(bits_N >> shift).mul_(signed(factor))
        if out.is_floating_point():
            part_N.copy_((bits_N >> 40).float().mul_(spread * sqrt(3) / 2**23).add_(mean))
        else:
            part_N.copy_(bits_N >> (64 - 8 * out.itemsize))
    return out


def _in_whole(place_N: Tensor, shape: Sequence[int], cut: Cut | None) -> Tensor:
    """Return the places in the whole of places in a part of this shape."""
    if cut is None:
        return place_N
    found_N, stride = torch.zeros_like(place_N), 1
    for size, whole, along in zip(reversed(shape), reversed(cut.shape), reversed(cut.along), strict=True):
        at_N = place_N % size
        found_N += stride * (at_N if along is None else along.places.to(place_N.device)[at_N])
        place_N, stride = place_N // size, stride * whole
    return found_N


def signed(word: int) -> int:
    """Return the signed integer of 64 bits."""
    return word - (word >> 63 << 64)


def random_format(quantization_config: object, model: TargetModel) -> WeightFormat:
    """Return the format of a ``quantization_config`` without files: every projection of the model's layers is quantized
    unless the config excludes it, and so is a layer after the last, which may draft. Raises ValueError as
    ``read_format`` does."""
    with suppress(ValueError):
        return read_format(quantization_config, {})  # of the KV cache alone
    found: dict[str, torch.dtype | None] = {}
    for path, module in model.named_modules():
        outside, _, name = ".".join(model.renamed.get(part, part) for part in path.split(".")).rpartition(".")
        if not isinstance(module, Projection) or not outside or name == "shared_expert_gate":  # one output
            continue
        for part in module.parts or [name]:
            tensors = {f"{outside}.{part}.{kind}": dtype for kind, dtype in _QUANTIZED.items()}
            try:
                read_format(quantization_config, tensors)
            except ExcludedError:
                continue
            except ValueError:
                tensors |= dict.fromkeys(f"{outside}.{part}.{kind}" for kind in _INDICES)
                read_format(quantization_config, tensors)
            found |= tensors
    last, after = (f"layers.{number}." for number in (model.config.num_layers - 1, model.config.num_layers))
    found |= {name.replace(last, after): dtype for name, dtype in found.items() if name.startswith(last)}
    return read_format(quantization_config, found)
