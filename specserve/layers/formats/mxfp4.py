"""MXFP4 as gpt-oss stores its experts: numbers of 4 bits, of which 32 share a power of two. They are converted to
bfloat16 when they are read, which is exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specserve.layers.linear import PLAIN
from specserve.layers.weights import Dtypes, WeightFormat

GROUP = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of the exponents


def read(config: Mapping[str, Any], files: Dtypes) -> WeightFormat:
    """Read ``quant_method: mxfp4``. Only experts are stored so."""
    return PLAIN


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers ``[O, I]`` in bfloat16. ``blocks``: uint8 ``[O, I / 32, 16]``, the earlier of two numbers in
    the lower bits; ``scales``: uint8 ``[O, I / 32]``, exponents plus 127."""
    values = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()
    return torch.ldexp(values[codes], scales.int()[..., None] - _BIAS).flatten(1).bfloat16()
