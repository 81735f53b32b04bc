"""PTX that makes bytes or 16-bit floats of 4-bit numbers, four at a time: of low halves of bytes, and of high ones."""

from __future__ import annotations

import triton.language as tl

SIXTEENFOLD = tl.constexpr(
    """{
    .reg .b32 up;
    shl.b32 up, $2, 4;
    and.b32 $0, up, 0xf0f0f0f0;
    and.b32 $1, $2, 0xf0f0f0f0;
    }"""
)
"""In two's complement, times 16."""
LESS = tl.constexpr(
    """{
    .reg .b32 down, low, high;
    shr.b32 down, $2, 4;
    lop3.b32 low, $2, 0x0f0f0f0f, 0x80808080, 0xea;
    lop3.b32 high, down, 0x0f0f0f0f, 0x80808080, 0xea;
    sub.u32 low, low, $3;
    sub.u32 high, high, $3;
    xor.b32 $0, low, 0x80808080;
    xor.b32 $1, high, 0x80808080;
    }"""
)
"""Minus the second argument. The highest bit of a byte keeps a difference from borrowing, and is its inverted sign."""


def _by_pairs(begin: str, lines: tuple[str, ...]) -> str:
    """Repeat ``lines`` for each register of the result: ``pair`` has a byte in each half."""
    pairs = [("down", "0x4140"), ("down", "0x4342"), ("up", "0x4140"), ("up", "0x4342")]
    found = [
        "{",
        ".reg .b32 up, down, zero0, zero1, less, pair, sign;",
        begin,
        "mov.b32 down, $4;",
        "shr.b32 up, $4, 4;",
    ]
    for number, (word, selected) in enumerate(pairs):
        found += [
            f"prmt.b32 pair, {word}, 0, {selected};",
            *(line.replace("out", f"${number}").replace("zero", f"zero{number % 2}") for line in lines),
        ]
    return "\n".join([*found, "}"])


def _floats(zeros: bool, half: bool) -> str:
    """Make floats, pairs of which share a register. A half is put into the lowest bits of a power of two, which the
    result is less; without zero points, the highest bit of two's complement is inverted, and the result also 8 less.
    Zero points are each byte's own: in some layouts two of the four are another row's."""
    power, minus_one, one, less = (
        ("0x64006400", "0xbc00bc00", "0x3c003c00", "0xe408e408")
        if half
        else ("0x43004300", "0xbf80bf80", "0x3f803f80", "0xc308c308")
    )
    kind = "f16x2" if half else "bf16x2"
    if zeros:
        begin = f"prmt.b32 zero0, $5, 0, 0x4140; or.b32 zero0, zero0, {power}; mov.b32 less, {minus_one};"
        begin += f"prmt.b32 zero1, $5, 0, 0x4342; or.b32 zero1, zero1, {power};"
        make = f"lop3.b32 pair, pair, 0x000f000f, {power}, 0xea;"
        return _by_pairs(begin, (make, f"fma.rn.{kind} out, zero, less, pair;"))
    begin = f"mov.b32 zero0, {one}; mov.b32 zero1, {one}; mov.b32 less, {less};"
    make = f"lop3.b32 pair, pair, 0x000f000f, {power[:5]}8{power[6:9]}8, 0x6a;"
    return _by_pairs(begin, (make, f"fma.rn.{kind} out, pair, zero, less;"))


BFLOATS, HALFS = tl.constexpr(_floats(False, False)), tl.constexpr(_floats(False, True))
BFLOATS_LESS, HALFS_LESS = tl.constexpr(_floats(True, False)), tl.constexpr(_floats(True, True))
"""In bfloat16 and float16: of two's complement, and minus the second argument."""
