"""16-bit floats of floats of 4 bits: see the reference's layout. Shapes: O outputs, W words."""

from __future__ import annotations

import triton
import triton.language as tl

from specserve_kernels.ops.pdl import INTERPRETED
from specserve_kernels.reference.linear.floats import PLACES, SPREAD, TURNS

_COMPILED, _PLACES = tl.constexpr(not INTERPRETED), tl.constexpr(PLACES)


def _pairs(half: bool) -> str:
    """PTX that makes the four pairs of a word (``$8``): the sign and three bits that are the lowest of the exponent and
    the highest of the fraction, which is the number by a power of two, and by a factor of the first (``$9``) or second
    half of the inputs (``$10``)."""
    lines = ["{", ".reg .b32 size, sign, none;", "mov.b32 none, 0x80008000;"]
    last = sum(1 << place for place in PLACES[-1]) * 0x10001
    ways = [f"shf.l.wrap.b32 size, $8, $8, {by};" for by in TURNS]
    ways.append(f"and.b32 size, $8, {last}; mul.lo.u32 size, size, {SPREAD};")
    for number, way in enumerate(ways):
        lines += [way, "and.b32 size, size, 0x81c081c0;"]
        if half:
            lines += [
                "shl.b32 sign, size, 3;",
                "and.b32 sign, sign, 0x0e000e00;",
                "lop3.b32 size, size, 0x80008000, sign, 0xea;",
            ]
        lines += [
            f"fma.rn.{'f16x2' if half else 'bf16x2'} size, size, ${9 + number // 2}, none;",
            f"mov.b32 {{${2 * number}, ${2 * number + 1}}}, size;",
        ]
    return "\n".join([*lines, "}"])


def _factor(half: bool) -> str:
    """PTX that makes two equal floats of the byte of a word (``$1``) that ``$2`` selects: a scale by a power of two."""
    shift = "mul.lo.u32 $0, $0, 0x00800080;" if half else "mad.lo.u32 $0, $0, 0x00100010, 0x70007000;"
    return f"prmt.b32 $0, $1, 0, $2; {shift}"


_BFLOAT_PAIRS, _HALF_PAIRS = tl.constexpr(_pairs(False)), tl.constexpr(_pairs(True))
_BFLOAT_FACTOR, _HALF_FACTOR = tl.constexpr(_factor(False)), tl.constexpr(_factor(True))


@triton.jit
def weight_of_floats(
    words, scale_ptrs, there, step, TOTAL: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr
):
    """Return a step's weight ``[O, 128]`` without the outputs' units. ``words``: int32 ``[O, 16]``; ``scale_ptrs``: to
    each output's first int32 of the bytes of four groups, the next of which is ``TOTAL`` later."""
    EACH: tl.constexpr = 32 // GROUP  # scales of a word, and words with scales of a step
    many = step * EACH + tl.arange(0, EACH)
    scales = tl.load(scale_ptrs[:, None] + many[None, :] * TOTAL, mask=there[:, None])
    first = tl.arange(0, 4 // EACH) * EACH
    low = tl.reshape(factors(scales, first, dtype), (words.shape[0], 1, 4))
    high = tl.reshape(factors(scales, first + (EACH - 1), dtype), (words.shape[0], 1, 4))
    return weight_by(words, low, high, dtype)


@triton.jit
def weight_by(words, low, high, dtype: tl.constexpr):
    """Return the weight, of two groups' ``factors`` for each of a thread's words."""
    ROWS: tl.constexpr = words.shape[0]
    PAIRED: tl.constexpr = _COMPILED and dtype.primitive_bitwidth == 16
    words = tl.reshape(words, (ROWS, 4, words.shape[1] // 4))
    low, high = tl.broadcast_to(low, words.shape), tl.broadcast_to(high, words.shape)
    if PAIRED:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _BFLOAT_PAIRS if dtype == tl.bfloat16 else _HALF_PAIRS,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
            [words, low, high],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True,
            pack=1,
        )
    else:
        a, b = _number(words, low, 0, 0), _number(words, low, 0, 16)
        c, d = _number(words, low, 1, 0), _number(words, low, 1, 16)
        e, f = _number(words, high, 2, 0), _number(words, high, 2, 16)
        g, h = _number(words, high, 3, 0), _number(words, high, 3, 16)
    halves = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
    ordered = tl.reshape(tl.permute(halves, (0, 2, 5, 4, 1, 3)), (ROWS, 8 * words.shape[1] * words.shape[2]))
    return ordered.to(dtype, bitcast=True) if PAIRED else ordered.to(dtype)


@triton.jit
def factors(scales, byte, dtype: tl.constexpr):
    """Return ``[O, X, B]`` of scales ``[O, X]`` and which of their bytes, ``[B]``: for each of a thread's words a
    factor of one of its groups' two floats; as a float32 if not compiled for 16 bits."""
    wide = tl.broadcast_to(scales[:, :, None], (scales.shape[0], scales.shape[1], byte.shape[0]))
    byte = tl.broadcast_to(byte[None, None, :], wide.shape)
    if _COMPILED and dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            _BFLOAT_FACTOR if dtype == tl.bfloat16 else _HALF_FACTOR,
            "=r,r,r",
            [wide, byte + 0x4440],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        scale = wide >> byte * 8 & 255
        return ((scale & 7) + 8) * tl.exp2((scale >> 3).to(tl.float32) - 32)


@triton.jit
def _number(words, factor, PAIR: tl.constexpr, HIGHER: tl.constexpr):
    """Return a number of each word in float32: what the PTX makes of it."""
    code = tl.zeros_like(words)
    for bit in tl.static_range(4):
        code += (words >> (_PLACES[PAIR][bit] + HIGHER) % 32 & 1) << bit
    size = code & 7
    twice = size + tl.maximum(size - 4, 0) + 2 * tl.maximum(size - 6, 0)
    return tl.where(code > 7, -twice, twice) * 0.5 * factor
