"""A step's weight of 4-bit integers or int8 as floats of the activations' dtype, made where threads read it.

Four threads read 64 contiguous bytes of a row, 16 each, and a warp 8 adjacent rows. Tensor cores take 16 inputs at a
time, of which a thread has two adjacent ones of each half, and for a warp 16 adjacent rows. So that nothing moves
between threads, rows are read in the order in which they come to lie (``as_read``, ``in_rows``). 4-bit numbers are in
the order of threads in memory (``Packed``); for bytes, activations come in that order (``as_words``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from specserve_kernels.ops.pdl import INTERPRETED

_COMPILED = tl.constexpr(not INTERPRETED)


def _pairs_of_nibbles(half: bool, zeros: bool) -> str:
    """PTX that makes the four pairs of a word (``$8``). A number is put into the lowest bits of a power of two, which
    a second number (``$9``) takes away; without zero points, with the highest bit of two's complement inverted."""
    power, one, kind = (0x6400, 0x3C00, "f16x2") if half else (0x4300, 0x3F80, "bf16x2")
    lines = ["{", ".reg .b32 pair, one;", f"mov.b32 one, {one * 0x10001};"]
    for number, by in enumerate((0, 8, 4, 12)):
        lines += [
            f"shr.b32 pair, $8, {by};",
            f"lop3.b32 pair, pair, 0x000f000f, {(power + 8 * (not zeros)) * 0x10001}, 0x6a;",
            f"fma.rn.{kind} pair, pair, one, $9;",
            f"mov.b32 {{${2 * number}, ${2 * number + 1}}}, pair;",
        ]
    return "\n".join([*lines, "}"])


_OF_NIBBLES = tl.constexpr((_pairs_of_nibbles(False, False), _pairs_of_nibbles(True, False)))
_OF_NIBBLES_LESS = tl.constexpr((_pairs_of_nibbles(False, True), _pairs_of_nibbles(True, True)))
"""In bfloat16 and float16."""


@triton.jit
def as_read(r, WARPS: tl.constexpr):
    """Return which of a block's rows each is that a program reads."""
    BESIDE: tl.constexpr = 8 * WARPS
    return r // (2 * BESIDE) * (2 * BESIDE) + r % BESIDE // 8 * 16 + r // BESIDE % 2 * 8 + r % 8


@triton.jit
def in_rows(weight, WARPS: tl.constexpr):
    """Return rows that were read as ``as_read`` says in their order."""
    ROWS: tl.constexpr = weight.shape[0]
    WIDTH: tl.constexpr = weight.shape[1]
    parts = tl.reshape(weight, (ROWS // (16 * WARPS), 2, WARPS, 8, WIDTH))
    return tl.reshape(tl.permute(parts, (0, 2, 1, 3, 4)), (ROWS, WIDTH))


@triton.jit
def load_words(words_ptr, row, there, step, INPUTS: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr):
    """Return a step's words ``[boxes of 64 bytes, O, words]`` of some rows."""
    BOXES: tl.constexpr = (STEP * BITS + 511) // 512
    EACH: tl.constexpr = STEP * BITS // (32 * BOXES)
    WIDTH: tl.constexpr = (INPUTS + STEP - 1) // STEP * (BOXES * EACH)
    at = step * (BOXES * EACH) + tl.arange(0, BOXES)[:, None, None] * EACH + tl.arange(0, EACH)[None, None, :]
    words_ptrs = words_ptr + row[None, :, None] * WIDTH + at
    return tl.load(words_ptrs, mask=there[None, :, None])


@triton.jit
def weight_of_nibbles(words, zero, ZEROS: tl.constexpr, dtype: tl.constexpr):
    """Return the weight ``[O, STEP]`` of words ``[O, W]``, minus zero points ``[O]``."""
    ROWS: tl.constexpr = words.shape[0]
    EACH: tl.constexpr = words.shape[1] // 4
    words = tl.reshape(words, (ROWS, 4, EACH))
    PAIRED: tl.constexpr = _COMPILED and dtype.primitive_bitwidth == 16
    if PAIRED:
        HALF: tl.constexpr = dtype == tl.float16
        POWER: tl.constexpr = 0x6400 if HALF else 0x4300
        less = zero * 0x10001 + ((POWER + 0x8000) * 0x10001 - 0x100000000)
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _OF_NIBBLES_LESS[HALF] if ZEROS else _OF_NIBBLES[HALF],
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [words, tl.broadcast_to(less[:, None, None], words.shape)],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True,
            pack=1,
        )
    else:
        less = zero[:, None, None]
        a, b = _nibble(words, less, 0, ZEROS), _nibble(words, less, 16, ZEROS)
        c, d = _nibble(words, less, 8, ZEROS), _nibble(words, less, 24, ZEROS)
        e, f = _nibble(words, less, 4, ZEROS), _nibble(words, less, 20, ZEROS)
        g, h = _nibble(words, less, 12, ZEROS), _nibble(words, less, 28, ZEROS)
    halves = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
    ordered = tl.reshape(tl.permute(halves, (0, 2, 5, 4, 1, 3)), (ROWS, 32 * EACH))
    return ordered.to(dtype, bitcast=True) if PAIRED else ordered.to(dtype)


@triton.jit
def _nibble(words, less, BY: tl.constexpr, ZEROS: tl.constexpr):
    code = words >> BY & 15
    return code - less if ZEROS else (code ^ 8) - 8


@triton.jit
def weight_of_bytes(words, dtype: tl.constexpr):
    """Return the weight ``[O, STEP]`` of words ``[B, O, W]`` of int8."""
    BOXES: tl.constexpr = words.shape[0]
    ROWS: tl.constexpr = words.shape[1]
    EACH: tl.constexpr = words.shape[2] // 4
    words = tl.reshape(words, (BOXES, ROWS, 4, EACH))
    a, b, c, d = (
        _byte(words, 0, dtype),
        _byte(words, 16, dtype),
        _byte(words, 8, dtype),
        _byte(words, 24, dtype),
    )
    pairs = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (1, 0, 3, 5, 2, 4))
    return tl.reshape(pairs, (ROWS, BOXES * EACH * 16))


@triton.jit
def _byte(words, BY: tl.constexpr, dtype: tl.constexpr):
    return (words >> BY & 255).to(tl.uint8).to(tl.int8, bitcast=True).to(dtype)


@triton.jit
def as_words(x):
    """Return a step's activations ``[STEP, P]`` in the order of the inputs of a weight of bytes."""
    STEP: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    BOXES: tl.constexpr = (STEP + 63) // 64
    parts = tl.reshape(x, (BOXES, 4, STEP // (16 * BOXES), 2, 2, COLUMNS))
    return tl.reshape(tl.permute(parts, (0, 2, 4, 1, 3, 5)), (STEP, COLUMNS))
