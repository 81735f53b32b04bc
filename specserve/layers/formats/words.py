"""Helpers for 4-bit and 8-bit formats that pack integers into int32 words, the first in the lowest bits.

Shapes: I inputs, O outputs, G groups of inputs, W words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from specserve_kernels import Numbers
from torch import Tensor

from specserve.layers.weights import Dtypes


def bits_of(config: Mapping[str, Any], field: str, accepted: tuple[int, ...]) -> int:
    """Return the number of bits. Raises ValueError for one that no kernel supports."""
    found = config.get(field)
    if found not in accepted:
        words = " or ".join(map(str, accepted))
        raise ValueError(f"quantization_config: {field} must be {words}, found {found!r}")
    return int(found)


def group_of(config: Mapping[str, Any], field: str = "group_size") -> int:
    """Return the inputs of a group, 0 for all of them. Raises ValueError for a number that no kernel supports."""
    found = config.get(field)
    if type(found) is int and (found in (-1, 32, 64) or (found > 0 and found % 128 == 0)):
        return max(found, 0)
    raise ValueError(
        f"quantization_config: {field} must be 32, 64, a multiple of 128, or -1 for all inputs, found {found!r}"
    )


def words_of(bits: int, group: int, zeros: bool) -> str:
    """Return the name of such weights in logs."""
    scales = f"a scale for {group} inputs" if group else "a scale an output"
    return f"{bits} bits with {scales}{' and zero points' if zeros else ''}"


def int32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32)


def index(inputs: int) -> Tensor:
    return torch.empty(inputs, dtype=torch.int32, device="cpu")


def scales_of(files: Dtypes, name: str) -> torch.dtype:
    """Return the dtype that scales are held in: the file's, if the kernels take it."""
    found = files.get(name)
    return torch.float32 if found in (None, torch.float64) else found


def packed_size(count: int, bits: int, of: str) -> int:
    """Return how many words ``count`` numbers fill. Raises ValueError if the last word is not full."""
    each = 32 // bits
    if count % each:
        raise ValueError(f"weights of {bits} bits need a multiple of {each} {of}, found {count}")
    return count // each


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the numbers that int32 ``[..., W]`` packs, as uint8 ``[..., W * 32 / bits]``."""
    bytes_ = words.contiguous().unsqueeze(-1).view(torch.uint8).flatten(-2)  # one word may have any stride
    return bytes_ if bits == 8 else torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)


def numbers_of(
    values_OI: Tensor,
    scale_OG: Tensor,
    zero_OG: Tensor | None,
    bits: int,
    group: int,
    index_I: Tensor | None = None,
) -> Numbers:
    """Return the weight of unsigned ``values_OI``; without ``zero_OG``, the zero is half of the range. ``index_I``: the
    group of each input, on the CPU; None, or all negative: groups are contiguous. Raises ValueError for groups of
    unequal sizes."""
    order_I = None if index_I is None else _order(index_I, group or len(index_I))
    if order_I is not None:
        values_OI = values_OI[:, order_I.long()]
    values_OI = (values_OI ^ 128).view(torch.int8) if bits == 8 else values_OI
    return Numbers(values_OI, scale_OG, zero_OG, group, 1, order_I)


def _order(index_I: Tensor, group: int) -> Tensor | None:
    """Return the inputs sorted by group, None if they already are."""
    side_by_side_I = torch.arange(len(index_I), dtype=index_I.dtype, device="cpu") // group
    if torch.equal(index_I, side_by_side_I) or (index_I < 0).all():
        return None
    sorted_I, order_I = index_I.sort(stable=True)
    if not torch.equal(sorted_I, side_by_side_I):
        raise ValueError(f"g_idx must put {group} inputs into each group")
    return order_I.int()
