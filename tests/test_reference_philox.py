import math
import statistics

import pytest

from tests.reference.philox import gumbel, gumbel_of_word, gumbel_row, philox4x32, word

Words4 = tuple[int, int, int, int]

RANDOM123 = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), RANDOM123)
def test_random123_known_answers(counter: Words4, key: tuple[int, int], expected: Words4) -> None:
    assert philox4x32(counter, key) == expected


def test_key_and_counter_layout() -> None:
    seed = (0x299F31D0 << 32) | 0xA4093822
    block = philox4x32((25, 7, 2, 0), (0xA4093822, 0x299F31D0))
    assert [word(seed, choice=2, position=7, token=t) for t in range(100, 104)] == list(block)
    assert word(0, 0, 0, 2) == 0xBC57AC4C


def test_each_part_of_the_key_matters() -> None:
    assert len({word(*args) for args in [(1, 0, 0, 0), (1 << 32, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0)]}) == 4


def test_gumbel_row_is_gumbel_token_by_token() -> None:
    assert list(gumbel_row(5, 1, 9, 11)) == [gumbel(5, 1, 9, token) for token in range(11)]


def test_extreme_words_are_finite_and_ordered() -> None:
    high, low = gumbel_of_word(0), gumbel_of_word(0xFFFFFFFF)
    assert high == pytest.approx(33 * math.log(2), rel=1e-9)  # -log(u) for small u
    assert low == pytest.approx(-math.log(33 * math.log(2)), rel=1e-9)
    assert gumbel_of_word(1) < high
    assert gumbel_of_word(0xFFFFFFFE) > low


def test_gumbel_moments() -> None:
    draws = [g for position in range(20) for g in gumbel_row(123, 0, position, 500)]
    assert statistics.fmean(draws) == pytest.approx(0.5772, abs=0.04)  # 3 standard errors
    assert statistics.variance(draws) == pytest.approx(math.pi**2 / 6, abs=0.12)
