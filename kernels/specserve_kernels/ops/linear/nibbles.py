"""PTX that makes bytes of 4-bit numbers, four at a time: of low halves of bytes, and of high ones."""

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
