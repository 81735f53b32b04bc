"""Philox4x32-10 (Salmon et al. 2011) on Python integers, and the Gumbel noise of design section 5."""

import math
from functools import lru_cache

Words4 = tuple[int, int, int, int]

MASK32 = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Ten rounds; the key is bumped between rounds, not after the last."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0 = MULTIPLIER_0 * c0
        product_1 = MULTIPLIER_1 * c2
        high_0, low_0 = product_0 >> 32, product_0 & MASK32
        high_1, low_1 = product_1 >> 32, product_1 & MASK32
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + WEYL_0) & MASK32, (k1 + WEYL_1) & MASK32
    return c0, c1, c2, c3


def gumbel_of_word(bits: int) -> float:
    """Small u carries the precision, and small u is a large g: winners are where floats are dense."""
    u = (bits + 0.5) * 2.0**-32
    exponential = -math.log1p(-u)
    return -math.log(exponential)


@lru_cache(maxsize=4096)
def gumbel_row(seed: int, choice: int, position: int, vocab: int) -> tuple[float, ...]:
    """The noise of tokens 0..vocab-1, of one (request seed, choice, position of the chosen token); cached because
    plain, draft and verify ask for the same rows."""
    key = (seed & MASK32, (seed >> 32) & MASK32)
    row: list[float] = []
    for block in range((vocab + 3) // 4):
        row.extend(gumbel_of_word(bits) for bits in philox4x32((block, position, choice, 0), key))
    return tuple(row[:vocab])
