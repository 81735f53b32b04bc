"""Continuations: the PyTorch version and the kernel against a slow one in Python."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from specserve_kernels import Continuations
from specserve_kernels.reference.tree import continuation as reference

pytest.importorskip("triton")
from specserve_kernels.ops.tree import continuation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, LONGEST, COLUMNS = 60, 9, 40


def expected(text: list[int], base: int, said: list[int], matched: int, size: int) -> list[tuple[int, int]]:
    """What comes next, and how many tokens match before each."""
    at = len(text) - 1 - base
    if at < 0 or text[base + 1 :] != said[:at]:
        return []
    return [(token, matched + at + i) for i, token in enumerate(said[at : at + size])]


@pytest.mark.parametrize("size", [1, 4, 16])
def test_follows_while_it_agrees(size: int) -> None:
    """Texts before, on, past and off what was said, in rows of their own; what is left of others is no part of it."""
    rng = random.Random(size)
    table = Continuations.empty(ROWS, LONGEST, torch.device(DEVICE))
    tokens_RC = torch.randint(3, (ROWS, COLUMNS), dtype=torch.int32)
    kinds = list(product([0, 1, 5, LONGEST], [-1, 0, 1, 4, LONGEST], [False, True]))
    rows, said_NP = rng.sample(range(ROWS), len(kinds)), torch.randint(3, (len(kinds), LONGEST))
    numbers, cases = [], []
    for row, told, (length, emitted, departs) in zip(rows, said_NP.tolist(), kinds, strict=True):
        base, said = rng.randrange(2, 20), told[:length]
        text = [rng.randrange(3) for _ in range(base + 1 + min(emitted, 0))] + [*said, *[1] * LONGEST][
            : max(emitted, 0)
        ]
        if departs:
            text[-1] = (text[-1] + 1) % 3
        tokens_RC[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        numbers.append([length, base, 4])
        cases.append((text, base, said, 4))
    rows_B = torch.tensor(rows, device=DEVICE)
    table.write(rows_B, torch.tensor(numbers, device=DEVICE), said_NP.to(DEVICE))
    length_B = torch.tensor([len(text) - 1 for text, *_ in cases], device=DEVICE)
    right = [expected(*case, size) for case in cases]
    assert 8 <= sum(map(bool, right)) < len(cases) / 2
    for module in (reference, continuation):
        token_BS, matched_BS = module.follow_continuation(table, tokens_RC.to(DEVICE), rows_B, length_B, size)
        for tokens, matched, wanted in zip(token_BS.tolist(), matched_BS.tolist(), right, strict=True):
            assert matched == [count for _, count in wanted] + [0] * (size - len(wanted)), module
            assert tokens[: len(wanted)] == [token for token, _ in wanted], module
