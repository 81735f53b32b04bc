"""Philox and Gumbel noise of the Triton kernels: the reference's integers, and noise against float64."""

from __future__ import annotations

import pytest
import torch
from specserve_kernels.reference.sampling.philox import philox4x32

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from specserve_kernels.ops.sampling import philox as ops_philox  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _words(out, noise, position, choice, seed, SIZE: tl.constexpr, IN_ORDER: tl.constexpr):
    token = tl.arange(0, SIZE)
    at, which, key = tl.load(position), tl.load(choice), tl.load(seed)
    if IN_ORDER:
        word = ops_philox.words_in_order(0, at, which, key, SIZE)
    else:
        word = ops_philox.words_of(token, at, which, key)
    tl.store(out + token, word.to(tl.int64))
    tl.store(noise + token, ops_philox.gumbel(word))


@triton.jit
def _gumbel(words, noise, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(noise + index, ops_philox.gumbel(tl.load(words + index).to(tl.uint32)))


KEYS = [(0, 0, 0), (1, 3, 7), (-1, 1, 2**31), (2**40 + 3, 0, 100), (-(2**63), 7, 4095), (2**63 - 1, 2, 1)]


@pytest.mark.parametrize(("seed", "choice", "position"), KEYS)
@pytest.mark.parametrize("in_order", [True, False])
def test_philox_bit_for_bit(seed: int, choice: int, position: int, in_order: bool) -> None:
    size = 64
    out, noise = torch.empty(size, dtype=torch.int64, device=DEVICE), torch.empty(size, device=DEVICE)
    at, which, key = (torch.tensor([value], device=DEVICE) for value in (position, choice, seed))
    _words[(1,)](out, noise, at, which, key, SIZE=size, IN_ORDER=in_order)
    zero = torch.tensor(0)
    words = philox4x32(
        torch.arange(size // 4),
        torch.tensor(position),
        torch.tensor(choice),
        zero,
        torch.tensor(seed & 0xFFFFFFFF),
        torch.tensor((seed >> 32) & 0xFFFFFFFF),
    )
    assert torch.equal(out.cpu(), torch.stack(words, -1).flatten())


def test_gumbel_noise_against_float64() -> None:
    """Within 2 ulp where the noise is larger than 1, which is where tokens win, as the reference in float32."""
    size = 16384
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 2**32, (size,), generator=generator)
    words[:6000] >>= torch.arange(6000) % 32  # small words: the tail that wins
    words[:4] = torch.tensor([0, 1, 0xFFFFFFFF, 0xFFFFFF80])
    noise = torch.empty(size, device=DEVICE)
    _gumbel[(1,)](words.to(DEVICE), noise, SIZE=size)
    exact = -torch.log(-torch.log1p(-(words.double() + 0.5) * 2.0**-32))
    found = noise.cpu().double()
    assert bool(found.isfinite().all())
    error = (found - exact).abs()
    large = exact > 1
    assert int(large.sum()) > 5000
    assert float((error / (torch.finfo(torch.float32).eps * exact.clamp(min=1)))[large].max()) <= 2
    assert float(error[exact > -1.5].max()) < 1e-5
