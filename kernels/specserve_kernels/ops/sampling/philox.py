"""Philox4x32-10 and Gumbel noise as Triton device functions, with the same integers as
``reference/sampling/philox.py``.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import triton
import triton.language as tl

_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_WEYL_0 = tl.constexpr(0x9E3779B9)
_WEYL_1 = tl.constexpr(0xBB67AE85)
_LARGEST = tl.constexpr(1 - 2.0**-24)  # the largest words round to 1 in float32


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Run ten rounds on uint32 counter words c0..c3 with key words k0, k1. Returns four uint32 blocks."""
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(c0, _MULTIPLIER_0)
        high_1 = tl.umulhi(c2, _MULTIPLIER_1)
        low_0 = tl.mul(c0, _MULTIPLIER_0, sanitize_overflow=False)
        low_1 = tl.mul(c2, _MULTIPLIER_1, sanitize_overflow=False)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 = tl.add(k0, _WEYL_0, sanitize_overflow=False)
        k1 = tl.add(k1, _WEYL_1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def token_words(group, position, choice, seed):
    """Return the four words of tokens ``4 * group .. 4 * group + 3``. Integers of any type, seed int64; group is a
    block."""
    return philox4x32(
        group.to(tl.uint32),
        position.to(tl.uint32),
        choice.to(tl.uint32),
        (position * 0).to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )


@triton.jit
def words_in_order(start, position, choice, seed, SIZE: tl.constexpr):
    """Return the words of tokens ``start .. start + SIZE - 1``, both multiples of 4: one call of Philox for four
    tokens."""
    group = start // 4 + tl.arange(0, SIZE // 4)
    w0, w1, w2, w3 = token_words(group, position, choice, seed)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def words_of(token, position, choice, seed):
    """Return the words of tokens in any order: one call of Philox for each token."""
    w0, w1, w2, w3 = token_words(token // 4, position, choice, seed)
    word = token % 4
    return tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))


@triton.jit
def gumbel(word):
    """Return standard Gumbel noise, float32, from uint32 words: ``-log(-log1p(-u))`` with ``u = (word + 0.5) / 2^32``.

    Triton lacks log1p on some backends. With w = 1 - u rounded, 1 - w is exact and ``log(w) * u / (1 - w)`` corrects
    log(w) for the rounding error (Kahan; HP-15C Advanced Functions Handbook, 1982): as accurate as the logarithm.
    """
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.0**-32, _LARGEST)
    w = 1.0 - u
    lost = tl.where(w == 1.0, 1.0, 1.0 - w)
    exponential = tl.where(w == 1.0, u, -tl.log(w) * (u / lost))
    return -tl.log(exponential)
