"""Floats of 4 bits (e2m1) with scales of groups, as kernels read them: MXFP4 and NVFP4. Shapes: O outputs, I inputs, P
inputs padded to whole steps, G groups of inputs, W words of 4 bytes.

They are multiplied by 16-bit activations as they are. Tensor cores take 16 inputs at a time, of which a thread has two
adjacent ones of each half. A word holds those of 32 inputs: four pairs. The four words that a thread needs for a step
are contiguous. A group's scale is a byte, 5 bits of exponent and 3 of a fraction, times a float32 of the output: all
numbers of e4m3, and all powers of two unless an output has much smaller ones, which is refused. So a number by its
group's scale is exact in both kinds of 16-bit floats.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

FLOATS4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What a float of 4 bits means by its lowest three; the highest is its sign."""
FLOAT_STEP = 128  # inputs of a step
FLOAT_GROUPS = (16, 32)  # inputs that may share a scale
TURNS = 0, 29, 26
"""By how much a word is turned left for a pair to come to the places that it has in two bfloat16 numbers."""
SPREAD = 1 << 3 | 1 << 8 | 1 << 14
"""By what the last pair's bits are multiplied to come there: no turn finds them next to three others."""
PLACES = (6, 7, 8, 15), (9, 10, 11, 18), (12, 13, 14, 21), (3, 4, 0, 1)
"""Where a word has the four bits of each pair's first number, the lowest first; those of the second are 16 higher."""
_BIAS, _LARGEST, _LEAST = 29, 30, 6  # of a scale's exponent
SLICE = 1 << 26  # numbers packed at a time, which bounds the copies


def pack_floats(
    values_OI: Tensor, scale_OG: Tensor, group: int, unit_O1: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the words, uint8 ``[O, P / 2]``, the scales, uint8 ``[W, O, 4]``, and what multiplies them, float32
    ``[O]``. ``values_OI``: uint8 from 0 to 15. Raises ValueError for scales that can't be stored."""
    if group not in FLOAT_GROUPS:
        raise ValueError(f"4-bit floats in groups of {group} inputs; accepted are 16 and 32")
    one = scale_OG.new_ones(1, 1) if unit_O1 is None else unit_O1
    given = values_OI, scale_OG, one.float().expand(len(values_OI), 1)
    slices = [each.split(max(1, SLICE // values_OI.shape[1])) for each in given]
    packed, last = list[tuple[Tensor, ...]](), len(slices[0]) - 1
    for number, each in enumerate(zip(*slices, strict=True)):
        alike = values_OI.is_meta and 0 < number < last  # without data, one stands for all
        packed.append(tuple(map(torch.clone, packed[0])) if alike else _pack(group, *each))
    words, scales, units = zip(*packed, strict=True)
    return torch.cat(words), torch.cat(scales, 1).contiguous(), torch.cat(units)


def _pack(group: int, values_OI: Tensor, scale_OG: Tensor, unit_O1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values_OGI = pad(values_OI, (0, -values_OI.shape[1] % group)).unflatten(1, (-1, group))
    fraction_OG, exponent_OG = torch.frexp(scale_OG.float())
    used_OG = ((values_OGI & 7) != 0).any(2) & (fraction_OG != 0)
    largest_O1 = torch.where(used_OG, exponent_OG, -256).amax(1, keepdim=True).clamp_min(-125)
    exponent_OG = exponent_OG - largest_O1 + _LARGEST
    fraction_OG = fraction_OG * 16 - 8
    fits_OG = (exponent_OG >= _LEAST) & (fraction_OG == fraction_OG.int()) & (fraction_OG >= 0)
    if not scale_OG.is_meta and not fits_OG.logical_or(~used_OG).all():
        raise ValueError(
            "scales of 4-bit floats must be positive, of 4 bits, and at most 2 ** 24 apart in an output"
        )
    byte_OG = torch.where(used_OG, exponent_OG * 8 + fraction_OG.int(), 0).to(torch.uint8)
    byte_OG = pad(byte_OG, (0, -byte_OG.shape[1] % (FLOAT_STEP // group)))
    words_OP = _to_words(torch.where(used_OG[:, :, None], values_OGI, 0).flatten(1))
    unit_O1 = torch.exp2(largest_O1 - (_LARGEST - _BIAS + 1.0)) * unit_O1
    return words_OP, byte_OG.unflatten(1, (-1, 4)).transpose(0, 1), unit_O1.flatten()


def unpack_scales(scale_WO4: Tensor) -> Tensor:
    """Return what ``pack_floats`` makes of scales, float32 ``[O, G]`` without what multiplies them."""
    byte_OG = scale_WO4.transpose(0, 1).flatten(1).int()
    return torch.ldexp(1 + (byte_OG & 7) / 8, (byte_OG >> 3) - _BIAS)


def _to_words(values_OI: Tensor) -> Tensor:
    padded_OP = pad(values_OI, (0, -values_OI.shape[1] % FLOAT_STEP))
    # steps, thirty-twos, halves, eights, threads, numbers of a pair to steps, threads, thirty-twos, numbers
    parts = padded_OP.view(len(padded_OP), -1, 4, 2, 2, 4, 2).permute(0, 1, 5, 2, 3, 4, 6).flatten(4)
    words = torch.zeros_like(parts[..., 0], dtype=torch.int32)
    for number in range(1 if values_OI.is_meta else 8):  # without data, one takes as much memory
        code = parts[..., number].int()
        for bit, place in enumerate(PLACES[number // 2]):
            words |= (code >> bit & 1) << (place + number % 2 * 16) % 32
    return words.flatten(1).view(torch.uint8)


def unpack_floats(words_OP: Tensor) -> Tensor:
    """Return the values, uint8 ``[O, P]`` from 0 to 15."""
    words = words_OP.view(torch.int32).unflatten(1, (-1, 4, 4))
    numbers = [
        sum((words >> (place + number % 2 * 16) % 32 & 1) << bit for bit, place in enumerate(places))
        for places in PLACES
        for number in range(2)
    ]
    parts: Tensor = torch.stack(numbers, -1).to(torch.uint8).unflatten(4, (2, 2, 2))
    return parts.permute(0, 1, 3, 4, 5, 2, 6).flatten(1)
