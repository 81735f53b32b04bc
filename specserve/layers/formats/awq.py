"""4-bit weights as stored by AutoAWQ's ``gemm``: ``quant_method: awq``.

``qweight`` int32 ``[I, O / 8]`` packs eight outputs, the even ones first: 0, 2, 4, 6, 1, 3, 5, 7. ``qzeros`` int32
``[G, O / 8]`` likewise, ``scales`` float16 ``[G, O]``. A weight is ``(q - zero) * scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from specserve_kernels import Numbers
from torch import Tensor

from specserve.layers.formats.fp8 import named_by
from specserve.layers.formats.stored import (
    LEAST_GROUP,
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
from specserve.layers.formats.words import (
    bits_of,
    group_of,
    int32,
    numbers_of,
    packed_size,
    scales_of,
    unpack_words,
    words_of,
)
from specserve.layers.weights import Dtypes

_LAYOUTS = ("gemm", "GEMM")


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """``group``: inputs that share a scale; 0: all. ``scales``: their dtype."""

    group: int
    scales: torch.dtype = torch.float16
    split: int = 1
    bits: ClassVar[int] = 4

    @property
    def words(self) -> str:
        return words_of(4, self.group, zeros=True)

    def tensors(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        groups, words = -(-inputs // (self.group or inputs)), packed_size(outputs, 4, "outputs")
        return {
            "qweight": int32(inputs, words),
            "qzeros": int32(groups, words),
            "scales": torch.empty(groups, outputs, dtype=self.scales),
        }

    def fitted(self, outputs: int, inputs: int) -> AwqLayout:
        check_cuts(outputs, inputs, 8, LEAST_GROUP if self.group else 1)
        group, split = smaller_groups(self.group, inputs)
        return replace(self, group=group, split=self.split * split)

    def numbers(self, stored: Mapping[str, Tensor], device: torch.device) -> Numbers:
        values_OI, zero_OG = (_in_order(moved(stored[name], device)).T for name in ("qweight", "qzeros"))
        scale_OG = moved(stored["scales"], device, self.scales).T
        return numbers_of(values_OI.contiguous(), scale_OG, zero_OG, 4, self.group)


def _in_order(words: Tensor) -> Tensor:
    """Return the unpacked numbers ``[..., O]`` in order."""
    evens_and_odds: Tensor = unpack_words(words, 4).unflatten(-1, (-1, 2, 4))
    return evens_and_odds.transpose(-1, -2).flatten(-3)


def read(config: Mapping[str, Any], files: Dtypes) -> StoredWeights:
    """Read ``quant_method: awq``, and the fields of its older ``quant_config.json``."""
    old = "w_bit" in config
    bits_of(config, "w_bit" if old else "bits", (4,))
    one_of(config, "version", _LAYOUTS)
    one_of(config, "format", _LAYOUTS)
    one_of(config, "zero_point", (True,))
    group = group_of(config, "q_group_size" if old else "group_size")
    modules = modules_with(files, "qweight")
    layouts = {module: AwqLayout(group, scales_of(files, f"{module}.scales")) for module in modules}
    field = "modules_to_not_convert"
    check_left_out(layouts, field, named_by(texts(config, field)))
    return stored_weights("awq", layouts, ())
