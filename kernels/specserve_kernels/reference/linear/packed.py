"""A projection with a checkpoint's quantized weight: FP8, int8 or 4 bits.

Shapes: T tokens, O outputs, I inputs, P inputs padded to whole steps, G groups of inputs, S scales of a group, W words
of 4 bytes, each with the numbers of N groups, R selected rows. A weight holds the numbers of the checkpoint: int8,
float8_e4m3fn, or 4 bits minus a zero point (8 if the file has none). A scale, in float32 or in the file's dtype, is for
one output or several consecutive ones, and for a group of inputs or all. Nothing is rounded again.

FP8 weights are multiplied by activations quantized to FP8, with one scale a token, which is computed from them: scales
in a checkpoint, which come from other texts, are not used. Other weights take activations as they are.

``Packed`` is the same weight as kernels read it. In 4 bits, tensor cores take 32 inputs at a time: two halves, each of
four fours. One thread's fours of all halves of a step (a group, or 128 inputs) are contiguous, so that it reads them at
once. The numbers of a first half are the low bits of their bytes. Without zero points, numbers are minus 8, in two's
complement. Experts' are multiplied by 16-bit activations: a thread's four are two adjacent ones of each half of 16
inputs. 8-bit weights keep the order of the inputs. Floats of 4 bits are in the order of ``linear.floats``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specserve_kernels.reference.layer.activation import Gate, apply_gate
from specserve_kernels.reference.linear.floats import (
    FLOAT_STEP,
    FLOATS4,
    pack_floats,
    unpack_floats,
    unpack_scales,
)
from specserve_kernels.reference.linear.quantize import FP8, PAIRED, Rounded, round_inputs, rounded_inputs

STEP = 128  # most inputs of a step
LEAST_GROUP = 32  # inputs: what tensor cores take at a time
SYMMETRIC_ZERO = 8
NIBBLES = torch.uint8
"""The dtype of 4-bit weights, both with one number a byte and packed with two."""


class Numbers(NamedTuple):
    """A weight's numbers and their meaning: ``(values - zero) * scale``.

    ``values_OI``: int8, float8_e4m3fn, or uint8 from 0 to 15. ``scale_SG``: each applies to ``rows`` outputs and
    ``group`` inputs; the last group may be smaller, and a single group covers all inputs. ``zero_OG``: uint8, only in 4
    bits. ``order_I``: int32, the input that each column of values belongs to, if groups are not contiguous. ``floats``:
    4 bits are those of ``FLOATS4``; ``unit_O1``: what else their scales are multiplied by, float32.
    """

    values_OI: Tensor
    scale_SG: Tensor
    zero_OG: Tensor | None = None
    group: int = 0
    rows: int = 1
    order_I: Tensor | None = None
    floats: bool = False
    unit_O1: Tensor | None = None


class Packed(NamedTuple):
    """``Numbers`` as kernels read them. ``values``: int8 or float8_e4m3fn ``[O, P]``, uint8 ``[O, P / 2]``.
    ``scale_WSN`` and ``zero_WON``: for every ``step`` inputs, or one for all (``[1, S, 1]``); ``rows`` outputs share a
    scale. ``order_I`` as in ``Numbers``. ``floats``: inputs of a group if 4 bits are floats, otherwise 0; their scales
    are bytes, and ``unit_O`` multiplies them. ``stacked``: integers of 4 bits are in the order of experts'."""

    values: Tensor
    scale_WSN: Tensor
    zero_WON: Tensor | None
    inputs: int
    step: int
    rows: int
    order_I: Tensor | None = None
    floats: int = 0
    unit_O: Tensor | None = None
    stacked: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.values.dtype == NIBBLES else 8

    @property
    def rounding(self) -> torch.dtype | None:
        """What activations are rounded to, None: they are multiplied as they are."""
        return FP8 if self.values.dtype == FP8 else None if self.floats else PAIRED

    @property
    def grouped(self) -> bool:
        """Whether groups of inputs have different scales or zeros."""
        words, _, many = self.scale_WSN.shape
        return words * many > 1


def pack(numbers: Numbers, stacked: bool = False) -> Packed:
    """Order a weight for the kernels, ``stacked`` for those of experts. Raises ValueError for groups that they don't
    support."""
    values_OI, scale_SG, zero_OG, group, rows, order_I, floats, unit_O1 = numbers
    inputs, many = values_OI.shape[1], scale_SG.shape[1]
    if floats:
        words, scale, unit_O = pack_floats(values_OI, scale_SG, group, unit_O1)
        return Packed(words, scale, None, inputs, FLOAT_STEP, 1, floats=group, unit_O=unit_O)
    step = STEP if many == 1 else min(group, STEP)
    if many > 1 and (group % step or step not in (LEAST_GROUP, 2 * LEAST_GROUP, STEP)):
        raise ValueError(f"groups of {group} inputs; accepted are 32, 64, multiples of 128, and all inputs")
    if many == 1 and zero_OG is not None:
        scale_SG, zero_OG = (each.expand(-1, -(-inputs // step)) for each in (scale_SG, zero_OG))
    elif many > 1 and group > step:
        scale_SG = _each(scale_SG, group // step, -(-inputs // step))
        zero_OG = None if zero_OG is None else _each(zero_OG, group // step, -(-inputs // step))
    values = _ordered(values_OI, step, zero_OG is not None, stacked)
    zero_WON = None if zero_OG is None else _in_words(zero_OG)
    scale_WSN = _in_words(scale_SG) if scale_SG.shape[1] > 1 else scale_SG[None].contiguous()
    return Packed(values, scale_WSN, zero_WON, inputs, step, rows, order_I, stacked=stacked)


def _in_words(each_OG: Tensor) -> Tensor:
    """Put the numbers of consecutive groups next to each other: loads of less than 4 bytes are not prefetched."""
    many = 4 // each_OG.element_size()
    padded_OG = _padded(each_OG, many)
    return padded_OG.view(len(each_OG), -1, many).transpose(0, 1).contiguous()


def _each(given_OG: Tensor, times: int, count: int) -> Tensor:
    return given_OG.repeat_interleave(times, 1)[:, :count]


def _padded(each_OI: Tensor, many: int) -> Tensor:
    """Return it with a multiple of ``many`` columns: itself if possible, which ``pad`` would copy."""
    return pad(each_OI, (0, -each_OI.shape[1] % many)) if each_OI.shape[1] % many else each_OI


def _ordered(values_OI: Tensor, step: int, zeros: bool, stacked: bool) -> Tensor:
    """Pad to whole steps. In 4 bits, reorder outputs, steps, thirty-twos, halves, fours, numbers of a four to outputs,
    steps, fours, thirty-twos, numbers, halves, which share bytes."""
    plain = _padded(values_OI.view(torch.uint8), step)
    if values_OI.dtype != NIBBLES:
        return plain.view(values_OI.dtype)
    if stacked:  # eights, fours, pairs to fours, pairs, eights
        plain = plain.view(len(plain), -1, 2, 4, 2).permute(0, 1, 3, 4, 2).reshape(plain.shape)
    low, high = (
        (plain if zeros else plain ^ SYMMETRIC_ZERO).view(len(plain), -1, step // 32, 2, 4, 4).unbind(3)
    )
    return (low | high << 4).transpose(2, 3).flatten(1)


def unpack(packed: Packed, ids_R: Tensor | None = None) -> Numbers:
    """Return the weight, or the rows ``ids_R`` of it, as numbers of single outputs."""
    row_O = torch.arange(len(packed.values), device=packed.values.device) if ids_R is None else ids_R
    picked = packed.values.view(torch.uint8)[row_O].view(packed.values.dtype)
    if packed.floats:
        assert packed.unit_O is not None
        values_OI, scale_OG = unpack_floats(picked), unpack_scales(packed.scale_WSN[:, row_O])
        unit_O1 = packed.unit_O[row_O, None]
        return Numbers(
            values_OI[:, : packed.inputs], scale_OG, None, packed.floats, floats=True, unit_O1=unit_O1
        )
    if packed.bits == 8:
        values_OI = picked[:, : packed.inputs]
    else:
        both = torch.stack((picked & 15, picked >> 4), -1)
        parts = both.view(len(both), -1, 4, packed.step // 32, 4, 2).permute(0, 1, 3, 5, 2, 4)
        values_OI = parts.flatten(1)
        if packed.stacked:
            values_OI = values_OI.view(len(both), -1, 4, 2, 2).permute(0, 1, 4, 2, 3).flatten(1)
        values_OI = values_OI[:, : packed.inputs]
        values_OI = values_OI if packed.zero_WON is not None else values_OI ^ SYMMETRIC_ZERO

    def spread(each_WON: Tensor) -> Tensor:
        each_OG = each_WON.transpose(0, 1).flatten(1)
        return each_OG if packed.grouped else each_OG[:, :1]

    zero_OG = None if packed.zero_WON is None else spread(packed.zero_WON[:, row_O])
    scale_OG = spread(packed.scale_WSN[:, row_O // packed.rows])
    return Numbers(values_OI, scale_OG, zero_OG, packed.step, 1, packed.order_I)


def dequantize_packed(packed: Packed, dtype: torch.dtype, ids_R: Tensor | None = None) -> Tensor:
    """Return the weight ``[O, I]``, or its rows ``[R, I]``, as ``dequantize_numbers``."""
    return dequantize_numbers(unpack(packed, ids_R), dtype)


def dequantize_numbers(numbers: Numbers, dtype: torch.dtype) -> Tensor:
    """Return the weight ``[O, I]`` in ``dtype``: computed in float32 at least and rounded once."""
    values_OI, scale_SG, zero_OG, group, rows, order_I, floats, unit_O1 = numbers
    (outputs, inputs), wide = values_OI.shape, torch.promote_types(dtype, torch.float32)

    def spread(each_SG: Tensor) -> Tensor:
        each_SG = each_SG.to(wide)
        return each_SG if each_SG.shape[1] == 1 else _each(each_SG, group, inputs)

    if floats:
        table = torch.tensor([*FLOATS4, *(-each for each in FLOATS4)], dtype=wide, device=values_OI.device)
        plain_OI = table[values_OI.int()]
    else:
        plain_OI = values_OI.to(wide)
    if zero_OG is not None:
        plain_OI = plain_OI - spread(zero_OG)
    elif values_OI.dtype == NIBBLES and not floats:
        plain_OI = plain_OI - SYMMETRIC_ZERO
    scale_SI = spread(scale_SG)
    plain_OI = plain_OI * (scale_SI if rows == 1 else scale_SI.repeat_interleave(rows, 0)[:outputs])
    plain_OI = (plain_OI if unit_O1 is None else plain_OI * unit_O1.to(wide)).to(dtype)
    if order_I is None:
        return plain_OI
    return torch.empty_like(plain_OI).index_copy_(1, order_I.long(), plain_OI)


def packed_linear(
    x_TI: Tensor | Rounded, weight: Packed, bias_O: Tensor | None = None, gated: Gate = None
) -> Tensor:
    """Return ``x @ weight.T + bias`` in x's dtype, summed in float32 at least, and if ``gated`` its ``apply_gate``,
    which is half as wide. For FP8 weights, x is quantized by ``round_inputs`` first if needed. Its rows may be
    strided."""
    if not isinstance(x_TI, Tensor):
        plain_TI = x_TI.plain_TI
    else:
        plain_TI = rounded_inputs(x_TI, FP8) if weight.values.dtype == FP8 else x_TI
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    out_TO = plain_TI.to(wide) @ dequantize_packed(weight, wide).T
    out_TO = (out_TO if bias_O is None else out_TO + bias_O).to(x_TI.dtype)
    return apply_gate(out_TO, gated)


def gate_rounded(
    x_TI: Tensor | Rounded, weight: Packed, bias_O: Tensor | None, dtype: torch.dtype, gated: Gate = "silu"
) -> Rounded:
    """Return the gated ``packed_linear``, rounded to FP8 or 15 bits for the projection that reads it."""
    return round_inputs(packed_linear(x_TI, weight, bias_O, gated), dtype)
