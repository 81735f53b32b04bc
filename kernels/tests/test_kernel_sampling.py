"""The sampler's ops against the slow reference, over random and over awkward parameters."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from specserve_kernels import add_bias, penalize, perturb, truncate

from tests.reference import sampler

VOCAB = 37
NEVER = -math.inf


def random_logits(rng: random.Random) -> list[float]:
    """Some rows with ties, some with tokens that can't be."""
    style = rng.choice(["smooth", "ties", "banned", "flat"])
    values = [rng.gauss(0, 3) for _ in range(VOCAB)]
    if style == "ties":
        values = [float(round(value)) for value in values]
    if style == "banned":
        values = [NEVER if rng.random() < 0.4 else value for value in values]
        values[rng.randrange(VOCAB)] = 1.0
    return [1.5] * VOCAB if style == "flat" else values


def doubles(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_same(found: torch.Tensor, expected: list[torch.Tensor] | list[list[float]]) -> None:
    wanted = torch.stack([torch.as_tensor(row, dtype=torch.float64) for row in expected])
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)


def test_penalize() -> None:
    rng = random.Random(1)
    logits, prompts, outputs, params = [], [], [], []
    for _ in range(60):
        logits.append(random_logits(rng))
        prompts.append([rng.randrange(VOCAB) for _ in range(rng.randrange(6))])
        outputs.append([rng.randrange(VOCAB) for _ in range(rng.randrange(12))])
        params.append(
            [rng.choice([1.0, 1.3, 0.7]), rng.choice([0.0, 0.5, -1.0]), rng.choice([0.0, 0.8, -2.0])]
        )
    counts = torch.zeros(len(logits), VOCAB, dtype=torch.int32)
    seen = torch.zeros(len(logits), VOCAB, dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        for token in output:
            counts[row, token] += 1
        seen[row, prompt + output] = True
    repetition, frequency, presence = doubles(params).unbind(1)
    given = doubles(logits)
    found = penalize(given, counts, seen, repetition, frequency, presence)
    assert torch.equal(given, doubles(logits)), "inputs are not changed"
    expected = [
        sampler.penalise(
            doubles(row),
            prompt=prompt,
            output=output,
            repetition=values[0],
            frequency=values[1],
            presence=values[2],
        )
        for row, prompt, output, values in zip(logits, prompts, outputs, params, strict=True)
    ]
    assert_same(found, expected)


def test_add_bias() -> None:
    """Entries of a token add up, holes do nothing, a ban ends where it says."""
    rng = random.Random(2)
    rows, ids, values, until, positions, expected = [], [], [], [], [], []
    for _ in range(40):
        row = [rng.gauss(0, 3) for _ in range(VOCAB)]
        bias = {token: rng.uniform(-5, 5) for token in rng.sample(range(VOCAB), 4)}
        ban = rng.sample(range(VOCAB), 3)
        ban_until, position = rng.randrange(10), rng.randrange(10)
        entries = [(token, value, 2**62) for token, value in bias.items()]
        entries += [(token, NEVER, ban_until) for token in ban]
        entries += [(VOCAB, 3.0, 2**62), (VOCAB + 5, NEVER, 2**62)]
        rng.shuffle(entries)
        rows.append(row)
        ids.append([entry[0] for entry in entries])
        values.append([entry[1] for entry in entries])
        until.append([entry[2] for entry in entries])
        positions.append(position)
        expected.append(
            sampler.penalise(doubles(row), logit_bias=bias, ban=ban, ban_until=ban_until, position=position)
        )
    found = add_bias(
        doubles(rows), torch.tensor(ids), doubles(values), torch.tensor(until), torch.tensor(positions)
    )
    assert_same(found, expected)


def test_truncate_over_random_rows() -> None:
    rng = random.Random(3)
    rows, params = [], []
    for _ in range(400):
        rows.append(random_logits(rng))
        params.append(
            {
                "temperature": rng.choice([0.0, 0.3, 1.0, 1.7]),
                "top_k": rng.choice([-1, 0, 1, 2, 5, VOCAB - 1, VOCAB, VOCAB + 1, 10**9]),
                "top_p": rng.choice([1e-9, 0.1, 0.5, 0.9, 0.99, 1.0]),
                "min_p": rng.choice([0.0, 0.01, 0.2, 1.0]),
            }
        )
    found = truncate(
        doubles(rows),
        doubles([each["temperature"] for each in params]),
        torch.tensor([each["top_k"] for each in params]),
        doubles([each["top_p"] for each in params]),
        doubles([each["min_p"] for each in params]),
    )
    assert_same(
        found, [sampler.truncate(doubles(row), **each) for row, each in zip(rows, params, strict=True)]
    )


CASES: dict[str, tuple[list[float], dict[str, float], list[int]]] = {
    "top-k keeps ties": ([3, 2, 2, 2, 1], {"top_k": 2}, [0, 1, 2, 3]),
    "top-k of more than there are": ([3, 2, 1, 0, -1], {"top_k": 9}, [0, 1, 2, 3, 4]),
    "tiny top-p keeps the best": ([3, 5, 1, 0, -1], {"top_p": 1e-12}, [1]),
    "tiny top-p keeps all of the best": ([5, 5, 1, 5, -1], {"top_p": 1e-12}, [0, 1, 3]),
    "min-p of 1 keeps the best": ([1, 4, 3, 4, 0], {"min_p": 1.0}, [1, 3]),
    "top-p counts what top-k left": ([2, 2, 2, 2, -9], {"top_k": 4, "top_p": 0.25}, [0, 1, 2, 3]),
    "min-p is relative": ([0, -1, -2, -3, -4], {"min_p": math.exp(-2.5)}, [0, 1, 2]),
    "top-p ends where p is reached": ([0, -math.log(2), -math.log(2), -90, -90], {"top_p": 0.5}, [0]),
    "top-p across a boundary": ([0, 0, -50, -50, -50], {"top_p": 0.75}, [0, 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_truncate_by_hand(name: str) -> None:
    row, params, kept = CASES[name]
    found = truncate(
        doubles([row]),
        doubles([params.get("temperature", 1.0)]),
        torch.tensor([int(params.get("top_k", 0))]),
        doubles([params.get("top_p", 1.0)]),
        doubles([params.get("min_p", 0.0)]),
    )
    assert [i for i, value in enumerate(found[0].tolist()) if value > NEVER] == kept
    assert [found[0, i].item() for i in kept] == [row[i] for i in kept], "kept logits are unscaled"


def test_perturb() -> None:
    rng = random.Random(4)
    rows = [random_logits(rng) for _ in range(20)]
    temperatures = [rng.choice([0.0, 0.5, 1.3]) for _ in rows]
    noise = [list(sampler.gumbel_row(9, 0, position, VOCAB)) for position in range(len(rows))]
    found = perturb(doubles(rows), doubles(noise), doubles(temperatures))
    expected = [
        sampler.perturb(doubles(row), temperature=temperature, seed=9, choice=0, position=position)
        for position, (row, temperature) in enumerate(zip(rows, temperatures, strict=True))
    ]
    assert_same(found, expected)
    greedy = [i for i, temperature in enumerate(temperatures) if temperature == 0]
    assert torch.equal(found[greedy], doubles(rows)[greedy])
