"""PTX that converts float8_e4m3fn to float16, exactly."""

from __future__ import annotations

import triton.language as tl

FP8 = tl.constexpr(
    """{
    .reg .b16 e<2>;
    mov.b32 {e0, e1}, $2;
    cvt.rn.f16x2.e4m3x2 $0, e0;
    cvt.rn.f16x2.e4m3x2 $1, e1;
    }"""
)
"""Converts the four numbers of one register to two registers."""
