"""4-bit and 8-bit weights as stored by compressed-tensors' ``pack-quantized``; ``compressed_tensors`` uses it.

``weight_packed`` int32 ``[O, I / 8]`` packs eight inputs (four in 8 bits). ``weight_zero_point`` int32 ``[O / 8, G]``,
rounded up and only for asymmetric weights, packs eight outputs. ``weight_scale`` ``[O, G]``. ``weight_g_idx`` int32
``[I]``, which may be absent, is the group of each input. A weight is ``(q - zero) * scale``. ``weight_shape`` repeats O
and I.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from specserve_kernels import Numbers
from torch import Tensor

from specserve.layers.formats.stored import LEAST_GROUP, check_cuts, moved, smaller_groups
from specserve.layers.formats.words import index, int32, numbers_of, packed_size, unpack_words, words_of


@dataclass(frozen=True, slots=True)
class PackQuantizedLayout:
    """``group``: inputs that share a scale; 0: all. ``indexed``: the file has a ``weight_g_idx``. ``scales``: their
    dtype."""

    bits: int
    group: int
    symmetric: bool
    indexed: bool = False
    scales: torch.dtype = torch.bfloat16
    split: int = 1

    @property
    def words(self) -> str:
        return words_of(self.bits, self.group, zeros=not self.symmetric)

    def tensors(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        groups = -(-inputs // (self.group or inputs))
        found = {
            "weight_packed": int32(outputs, packed_size(inputs, self.bits, "inputs")),
            "weight_scale": torch.empty(outputs, groups, dtype=self.scales),
        }
        if not self.symmetric:
            found["weight_zero_point"] = int32(-(-outputs * self.bits // 32), groups)
        if self.indexed:
            found["weight_g_idx"] = index(inputs)
        return found

    def fitted(self, outputs: int, inputs: int) -> PackQuantizedLayout:
        word = 32 // self.bits
        check_cuts(outputs, inputs, 1 if self.symmetric else word, LEAST_GROUP if self.group else word)
        group, split = smaller_groups(self.group, inputs)
        return replace(self, group=group, split=self.split * split)

    def numbers(self, stored: Mapping[str, Tensor], device: torch.device) -> Numbers:
        values_OI, zero_OG = unpack_words(moved(stored["weight_packed"], device), self.bits), None
        if not self.symmetric:
            zero_GO = unpack_words(moved(stored["weight_zero_point"], device).T, self.bits)
            zero_OG = zero_GO[:, : len(values_OI)].T
        scale_OG, index_I = moved(stored["weight_scale"], device, self.scales), stored.get("weight_g_idx")
        return numbers_of(values_OI, scale_OG, zero_OG, self.bits, self.group, index_I)
