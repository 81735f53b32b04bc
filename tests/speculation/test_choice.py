"""The sampling rule at its limits."""

from __future__ import annotations

import pytest
import torch

from specserve.core import MIN_TEMPERATURE, SamplingParams
from specserve.speculation.sampler import best
from tests.engines import Checkpoints, answer_one, make_scheduler

PROMPT = [5, 9, 33, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 64, 4099, 128_256])
def test_ties_go_to_the_lowest_id(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    for _ in range(20):
        scores_NV = torch.randint(0, 5, (3, size), generator=generator).to(dtype)
        expected = [row.index(max(row)) for row in scores_NV.tolist()]
        assert best(scores_NV).tolist() == expected
    assert best(torch.zeros(2, size, dtype=dtype)).tolist() == [0, 0]


def test_the_least_temperature_is_not_greedy() -> None:
    assert not SamplingParams(temperature=MIN_TEMPERATURE).greedy
    assert SamplingParams(temperature=MIN_TEMPERATURE * 0.99).greedy


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_least_temperature_chooses_what_is_likeliest(dtype: str, random_models: Checkpoints) -> None:
    """Logits divided by it are numbers still, and truncation decides by them."""
    texts = [
        answer_one(
            make_scheduler(random_models.target, dtype=dtype),
            PROMPT,
            SamplingParams(
                max_tokens=16, seed=1, ignore_eos=True, top_p=0.9, min_p=0.05, temperature=temperature
            ),
        ).tokens
        for temperature in (0, MIN_TEMPERATURE * 0.99, MIN_TEMPERATURE)
    ]
    assert texts[0] == texts[1] == texts[2]
