"""4-bit floats (e2m1) as OpenAI's gpt-oss stores its experts: ``quant_method: mxfp4``.

``blocks`` uint8 ``[O, I / 32, 16]`` packs two inputs a byte, the first in the low half; ``scales`` uint8
``[O, I / 32]`` are the exponents of powers of two, plus 127. A weight is a float of 4 bits by its scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, ClassVar

import torch
from specserve_kernels import Numbers
from torch import Tensor

from specserve.layers.formats.fp8 import named_by
from specserve.layers.formats.stored import (
    Layout,
    StoredWeights,
    check_cuts,
    check_left_out,
    modules_with,
    moved,
    stored_weights,
    texts,
)
from specserve.layers.weights import Dtypes

GROUP = 32  # inputs that share a scale
_BIAS = 127


@dataclass(frozen=True, slots=True)
class Mxfp4Layout:
    bits: ClassVar[int] = 4
    group: ClassVar[int] = GROUP
    split: ClassVar[int] = 1

    @property
    def words(self) -> str:
        return f"floats of 4 bits with a scale for {GROUP} inputs"

    def tensors(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        if inputs % GROUP:
            raise ValueError(f"floats of 4 bits need a multiple of {GROUP} inputs, found {inputs}")
        blocks = torch.empty(outputs, inputs // GROUP, GROUP // 2, dtype=torch.uint8)
        return {"blocks": blocks, "scales": torch.empty(blocks.shape[:2], dtype=torch.uint8)}

    def fitted(self, outputs: int, inputs: int) -> Mxfp4Layout:
        check_cuts(outputs, inputs, 1, GROUP)
        return self

    def numbers(self, stored: Mapping[str, Tensor], device: torch.device) -> Numbers:
        bytes_OX = moved(stored["blocks"], device).flatten(1)
        values_OI = torch.stack((bytes_OX & 15, bytes_OX >> 4), -1).flatten(1)
        scale_OG = torch.exp2(moved(stored["scales"], device, torch.float32) - _BIAS)
        return Numbers(values_OI, scale_OG.bfloat16(), None, GROUP, floats=True)


def read(config: Mapping[str, Any], files: Dtypes) -> StoredWeights:
    """Read ``quant_method: mxfp4``."""
    left = texts(config, "modules_to_not_convert")
    layouts: dict[str, Layout] = dict.fromkeys(modules_with(files, "blocks"), Mxfp4Layout())

    def leaves_out(module: str) -> bool:
        return named_by(module, left) or any(fnmatch(module, f"{name}*") for name in left)

    check_left_out(layouts, "modules_to_not_convert", leaves_out)
    return stored_weights("mxfp4", layouts, ())
