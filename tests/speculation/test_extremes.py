"""Parameters at the ends of their ranges are served; those beyond never reach the engine."""

from __future__ import annotations

from typing import Any

import pytest

from specserve.core import SamplingParams, Speculation
from tests.engines import Checkpoints, answer_all, answer_one, make_scheduler

SMALLEST = 5e-324  # 0 in float32
PROMPT = [3, 4, 5]
GREEDY_LIKE: list[dict[str, Any]] = [
    {"temperature": SMALLEST},
    {"temperature": 1e-38, "top_p": 0.9},
    {"temperature": 1.0, "top_p": SMALLEST},
    {"temperature": 100.0, "top_k": 1},
    {"temperature": 100.0, "min_p": 1.0},
]
EXTREME: list[dict[str, Any]] = [
    {"top_k": 2**62},
    {"min_p": SMALLEST},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 100.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"logit_bias": dict.fromkeys(range(64), 100.0)},
    {"logit_bias": dict.fromkeys(range(64), -100.0), "min_tokens": 8, "stop_token_ids": list(range(63))},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"speculation": Speculation(max_draft_tokens=2**62)},
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_leaves_one_token_is_greedy(dtype: str, agreeing: Checkpoints) -> None:
    """All in one batch with the greedy request itself."""
    scheduler = agreeing.scheduler("EAGLE3", (3, 2, 6), dtype=dtype)
    params = [SamplingParams(max_tokens=8, **each) for each in ({"temperature": 0.0}, *GREEDY_LIKE)]
    greedy, *others = answer_all(scheduler, [(PROMPT, each) for each in params])
    assert [answer.tokens for answer in others] == [greedy.tokens] * len(GREEDY_LIKE)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_extreme_parameters_give_the_plain_text(dtype: str, agreeing: Checkpoints) -> None:
    drafted = agreeing.scheduler("EAGLE3", (3, 2, 6), dtype=dtype)
    plain = make_scheduler(agreeing.target, dtype=dtype)
    work = [(PROMPT, SamplingParams(**{"max_tokens": 8, "seed": 1} | each)) for each in EXTREME]
    found = [answer.tokens for answer in answer_all(drafted, work)]
    assert found == [answer.tokens for answer in answer_all(plain, work)]
    assert all(len(tokens) == 8 and all(0 <= token < 64 for token in tokens) for tokens in found)


@pytest.mark.parametrize("name", ["top_k", "max_tokens", "min_tokens"])
@pytest.mark.parametrize("value", [2**63, 10**30])
def test_counts_beyond_64_bits_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be in .*, found {value}"):
        SamplingParams(**{name: value})
    with pytest.raises(ValueError, match=rf"max_draft_tokens must be in .*, found {value}"):
        Speculation(max_draft_tokens=value)


@pytest.mark.parametrize(
    ("algorithm", "shape"), [("EAGLE", (40, 1, 41)), ("EAGLE3", (6, 8, 64)), ("EAGLE3", (2, 40, 64))]
)
def test_the_largest_shapes_up_to_the_end_of_the_context(
    algorithm: str, shape: tuple[int, int, int], agreeing: Checkpoints
) -> None:
    """Drafts reach beyond the context and the pool's pages are counted for them, but no text does."""
    settings: dict[str, Any] = {"context_length": 44, "page_size": 1}
    params = SamplingParams(temperature=0, ignore_eos=True)
    plain = make_scheduler(agreeing.target, **settings)
    for prompt in ([7], list(range(22)), list(range(43))):
        answer = answer_one(agreeing.scheduler(algorithm, shape, **settings), prompt, params)
        assert len(prompt) + len(answer.tokens) == 44
        assert answer.tokens == answer_one(plain, prompt, params).tokens
