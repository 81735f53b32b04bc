"""Philox4x32-10 and the Gumbel noise drawn from it, keyed by what is being chosen.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". 32-bit words live in int64 tensors, whose
products wrap modulo 2^64, so the integers are those of any other implementation.

Shapes: B requests, D consecutive positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox4x32(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run ten rounds on counter words c0..c3 with key words k0, k1 (int64 tensors of 32-bit values that broadcast).
    Returns four int64 tensors of 32-bit values."""
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def gumbel_noise(
    seed_B: Tensor, choice_B: Tensor, position_BD: Tensor, vocab_size: int, dtype: torch.dtype
) -> Tensor:
    """Return standard Gumbel noise ``[B, D, V]`` of every token at every position of every request.

    Key: the 64-bit seed (int64). Counter: (token // 4, position, choice, 0); a token takes word ``token % 4``. With ``u
    = (word + 0.5) / 2^32`` the noise is ``-log(-log1p(-u))``: small u, where floats are dense, is the tail that wins.
    """
    blocks = torch.arange((vocab_size + 3) // 4, device=seed_B.device)
    words = philox4x32(
        blocks,
        position_BD[..., None],
        choice_B[:, None, None],
        torch.zeros((), dtype=torch.int64, device=seed_B.device),
        (seed_B & _MASK)[:, None, None],
        ((seed_B >> 32) & _MASK)[:, None, None],
    )
    word_BDV = torch.stack(words, dim=-1).flatten(-2)[..., :vocab_size]
    u_BDV = (word_BDV.to(dtype) + 0.5) * 2.0**-32
    if dtype != torch.float64:
        u_BDV.clamp_(max=1 - 2.0**-24)  # the largest words round to 1 in float32
    return -torch.log(-torch.log1p(-u_BDV))
