"""PTX that converts float8_e4m3fn to bfloat16, exactly.

Hopper has no instruction for it: two numbers become float16, then float32, then bfloat16.
"""

from __future__ import annotations

import triton.language as tl

FP8 = tl.constexpr(
    """{
    .reg .b16 e<2>, h<4>;
    .reg .b32 p<2>;
    .reg .f32 f<4>;
    mov.b32 {e0, e1}, $2;
    cvt.rn.f16x2.e4m3x2 p0, e0;
    cvt.rn.f16x2.e4m3x2 p1, e1;
    mov.b32 {h0, h1}, p0;
    mov.b32 {h2, h3}, p1;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.f32.f16 f2, h2;
    cvt.f32.f16 f3, h3;
    cvt.rn.bf16x2.f32 $0, f1, f0;
    cvt.rn.bf16x2.f32 $1, f3, f2;
    }"""
)
"""Converts the four numbers of one register to two registers."""
