"""Philox bit for bit against Python integers, the noise against the same words in float64."""

from __future__ import annotations

import random

import pytest
import torch
from specserve_kernels.reference.sampling.philox import gumbel_noise, philox4x32

from tests.reference import philox

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
Words4 = tuple[int, int, int, int]


def words_of(counters: list[Words4], keys: list[tuple[int, int]]) -> list[Words4]:
    columns = [torch.tensor(column) for column in (*zip(*counters, strict=True), *zip(*keys, strict=True))]
    c0, c1, c2, c3, k0, k1 = columns
    out = torch.stack(philox4x32(c0, c1, c2, c3, k0, k1), dim=1)
    return [(row[0], row[1], row[2], row[3]) for row in out.tolist()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: Words4, key: tuple[int, int], expected: Words4) -> None:
    assert words_of([counter], [key]) == [expected]


def test_random_words_bit_for_bit() -> None:
    rng = random.Random(0)

    def word() -> int:
        return rng.choice([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, rng.getrandbits(32)])

    counters = [(word(), word(), word(), word()) for _ in range(300)]
    keys = [(word(), word()) for _ in counters]
    assert words_of(counters, keys) == [
        philox.philox4x32(counter, key) for counter, key in zip(counters, keys, strict=True)
    ]


SEEDS = [0, 1, -1, 2**40 + 3, -(2**63), 2**63 - 1]
CHOICES = [0, 3, 1, 0, 7, 2]
POSITIONS = [[0, 1, 2], [7, 8, 9], [100, 101, 102], [4095, 4096, 4097], [2**31, 5, 6], [1, 1, 1]]


def reference_noise(vocab: int) -> torch.Tensor:
    rows = [
        [philox.gumbel_row(seed, choice, position, vocab) for position in positions]
        for seed, choice, positions in zip(SEEDS, CHOICES, POSITIONS, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("vocab", [1, 4, 61, 1024])
def test_noise_in_float64(vocab: int) -> None:
    found = gumbel_noise(
        torch.tensor(SEEDS), torch.tensor(CHOICES), torch.tensor(POSITIONS), vocab, torch.float64
    )
    torch.testing.assert_close(found, reference_noise(vocab), rtol=1e-15, atol=1e-15)


def test_noise_in_float32() -> None:
    """Within 2 ulp of the float64 noise where the noise is larger than 1, which is where tokens win; below that
    float32 sees u itself only to 2^-24."""
    found = gumbel_noise(
        torch.tensor(SEEDS), torch.tensor(CHOICES), torch.tensor(POSITIONS), 4096, torch.float32
    )
    exact = reference_noise(4096)
    error = (found.double() - exact).abs()
    ulp = torch.finfo(torch.float32).eps * exact.abs().clamp(min=1)
    large = exact > 1
    assert bool(large.any())
    assert float((error / ulp)[large].max()) <= 2
    usual = exact > -1.5  # all but 1% of the draws
    assert float(error[usual].max()) < 1e-5
    assert bool(found.isfinite().all())


def test_the_largest_word_is_finite_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    import specserve_kernels.reference.sampling.philox as module

    def extremes(*words: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shape = torch.broadcast_shapes(*(word.shape for word in words))
        return tuple(torch.full(shape, word) for word in (0xFFFFFFFF, 0, 0xFFFFFF80, 1))

    monkeypatch.setattr(module, "philox4x32", extremes)
    for dtype in (torch.float32, torch.float64):
        found = gumbel_noise(torch.tensor([1]), torch.tensor([0]), torch.tensor([[0]]), 4, dtype).flatten()
        assert bool(found.isfinite().all())
        expected = [philox.gumbel_of_word(word) for word in (0xFFFFFFFF, 0, 0xFFFFFF80, 1)]
        low = pytest.approx(expected[0], rel=0.3 if dtype == torch.float32 else 1e-9)
        assert found[0].item() == low
        assert found[1].item() == pytest.approx(expected[1], rel=1e-6)
        assert found[3].item() == pytest.approx(expected[3], rel=1e-6)
