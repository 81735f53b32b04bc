"""Lookup: the PyTorch version against a slow one in Python, and the kernel against both."""

from __future__ import annotations

import random

import pytest
import torch
from specserve_kernels.reference.tree import lookup as reference

pytest.importorskip("triton")
from specserve_kernels.ops.tree import lookup

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT, SIZE = 3, 5


def expected(text: list[int], taken: int) -> list[tuple[list[int], int]]:
    """Continuations of a text, the best first, and how many tokens matched."""
    found: list[tuple[list[int], int]] = []
    for _ in range(COUNT):
        best, at = 0, -1
        for place in range(len(text) - 1):
            matched = 0
            while matched < min(16, place + 1) and text[place - matched] == text[-1 - matched]:
                matched += 1
            if matched and matched >= best and text[place + 1] not in [taken, *(c[0] for c, _ in found)]:
                best, at = matched, place
        if at < 0:
            break
        longer = [*text]
        for step in range(SIZE):
            longer.append(longer[at + 1 + step])
        found.append((longer[len(text) :], best))
    return found


@pytest.mark.parametrize("vocabulary", [1, 2, 4, 30])
def test_continuations(vocabulary: int) -> None:
    """Of texts of one token to many blocks, in rows of their own, which hold others' tokens after their ends."""
    rng = random.Random(vocabulary)
    lengths = [1, 2, 3, 17, 40, 100, 100, 100]
    texts = [[rng.randrange(vocabulary) for _ in range(length)] for length in lengths]
    for text in texts[-2:]:  # a passage that comes again
        text[70:90] = text[10:30]
        text[-12:] = text[40:52]
    taken = [rng.choice([-1, rng.randrange(vocabulary)]) for _ in texts]
    table = torch.full((10, 120), vocabulary - 1, dtype=torch.int32)
    rows = torch.randperm(10)[: len(texts)]
    for row, text in zip(rows.tolist(), texts, strict=True):
        table[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    given = table.to(DEVICE), rows.to(DEVICE), torch.tensor(lengths, device=DEVICE) - 1
    for module in (reference, lookup):
        found_BKS, matched_BK = module.find_continuations(
            *given, torch.tensor(taken, device=DEVICE), COUNT, SIZE
        )
        for b, (text, first) in enumerate(zip(texts, taken, strict=True)):
            right = expected(text, first)
            assert matched_BK[b].tolist() == [m for _, m in right] + [0] * (COUNT - len(right)), (b, module)
            assert found_BKS[b, : len(right)].tolist() == [c for c, _ in right], (b, module)


def test_a_long_text() -> None:
    """Of several blocks, of which some have no place that matches, and the best are in different ones."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(3, 50, (1, 9000), generator=generator, dtype=torch.int32)
    table[0, 3000:3020] = torch.arange(100, 120)
    table[0, 4090:4100] = torch.arange(105, 115)
    table[0, 8480:8490] = torch.arange(105, 115)
    table[0, 4100], table[0, 8490] = 7, 8
    given = table.to(DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    end = torch.tensor([8489], device=DEVICE), torch.tensor([-1], device=DEVICE)
    for module in (reference, lookup):
        found_BKS, matched_BK = module.find_continuations(*given, *end, COUNT, SIZE)
        assert found_BKS[0, 0].tolist() == table[0, 4100:4105].tolist()
        assert matched_BK.tolist() == [[10, 10, 0]]
        assert found_BKS[0, 1].tolist() == [115, 116, 117, 118, 119]
