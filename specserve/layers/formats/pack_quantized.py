"""4-bit and 8-bit weights as stored by compressed-tensors' ``pack-quantized``; ``compressed_tensors`` uses it.

``weight_packed`` int32 ``[O, I / 8]`` packs eight inputs (four in 8 bits). ``weight_zero_point`` int32 ``[O / 8, G]``,
rounded up and only for asymmetric weights, packs eight outputs. ``weight_scale`` ``[O, G]``. ``weight_g_idx`` int32
``[I]``, which may be absent, is the group of each input. A weight is ``(q - zero) * scale``. ``weight_shape`` repeats O
and I.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from specserve_kernels import Numbers
from torch import Tensor

from specserve.layers.formats.words import float32, int32, numbers_of, packed_size, unpack_words, words_of


@dataclass(frozen=True, slots=True)
class PackQuantizedLayout:
    """``group``: inputs that share a scale; 0: all. ``indexed``: the file has a ``weight_g_idx``."""

    bits: int
    group: int
    symmetric: bool
    indexed: bool = False

    @property
    def words(self) -> str:
        return words_of(self.bits, self.group, zeros=not self.symmetric)

    def tensors(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        groups = -(-inputs // (self.group or inputs))
        found = {
            "weight_packed": int32(outputs, packed_size(inputs, self.bits, "inputs")),
            "weight_scale": float32(outputs, groups),
        }
        if not self.symmetric:
            found["weight_zero_point"] = int32(-(-outputs * self.bits // 32), groups)
        if self.indexed:
            found["weight_g_idx"] = int32(inputs)
        return found

    def numbers(self, stored: Mapping[str, Tensor]) -> Numbers:
        values_OI, zero_OG = unpack_words(stored["weight_packed"], self.bits), None
        if not self.symmetric:
            zero_OG = unpack_words(stored["weight_zero_point"].T, self.bits)[:, : len(values_OI)].T
        scale_OG, index_I = stored["weight_scale"], stored.get("weight_g_idx")
        return numbers_of(values_OI, scale_OG, zero_OG, self.bits, self.group, index_I, torch.bfloat16)
