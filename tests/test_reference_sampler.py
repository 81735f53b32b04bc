import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.reference.sampler import choose, draft_log_probs, lowest_argmax, penalise, perturb, process

PROBS = (0.40, 0.30, 0.15, 0.10, 0.05)
LOGITS = [math.log(p) for p in PROBS]
CHI_SQUARE_001 = {0: 0.0, 1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47}  # by degrees of freedom, at p = 0.001


def kept(processed: torch.Tensor) -> list[int]:
    return [token for token, value in enumerate(processed.tolist()) if value > -math.inf]


def normalised(weights: Sequence[float]) -> list[float]:
    return [weight / math.fsum(weights) for weight in weights]


def chi_square(counts: Counter[int], expected: Sequence[float]) -> tuple[float, int]:
    total = counts.total()
    possible = [token for token, p in enumerate(expected) if p > 0]
    assert set(counts) <= set(possible)
    return sum((counts[t] - total * expected[t]) ** 2 / (total * expected[t]) for t in possible), len(
        possible
    ) - 1


@pytest.mark.parametrize(
    ("params", "weights"),
    [
        ({}, PROBS),
        ({"temperature": 0.5}, [p**2 for p in PROBS]),
        ({"temperature": 2.0}, [p**0.5 for p in PROBS]),
        ({"top_k": 2}, (0.4, 0.3, 0, 0, 0)),
        ({"top_p": 0.72}, (0.4, 0.3, 0.15, 0, 0)),
        ({"min_p": 0.3}, (0.4, 0.3, 0.15, 0, 0)),
        ({"top_k": 3, "top_p": 0.8}, (0.4, 0.3, 0, 0, 0)),  # 0.7 before renormalising, 0.824 after
        ({"temperature": 0.5, "top_p": 0.6}, (0.16, 0.09, 0, 0, 0)),  # 0.562 before token 1, 0.877 after
        ({"temperature": 2.0, "min_p": 0.55}, [p**0.5 for p in PROBS[:3]] + [0, 0]),
        ({"logit_bias": {4: math.log(8)}}, (0.4, 0.3, 0.15, 0.1, 0.4)),
        ({"output": [0, 0], "frequency": math.log(2)}, (0.1, 0.3, 0.15, 0.1, 0.05)),
        ({"output": [0, 0], "presence": math.log(2)}, (0.2, 0.3, 0.15, 0.1, 0.05)),
        ({"prompt": [1], "repetition": 2.0}, (0.4, 0.09, 0.15, 0.1, 0.05)),
        ({"ban": [0, 1], "ban_until": 9**9}, (0, 0, 0.15, 0.1, 0.05)),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.4, "temperature": 1.0}, (0.4, 0.3, 0, 0, 0)),
    ],
)
def test_draws_follow_the_exact_distribution(params: dict[str, Any], weights: Sequence[float]) -> None:
    """Over positions, over seeds and over choices alike."""
    temperature = params.get("temperature", 1.0)
    processed = process(LOGITS, position=0, **params)
    keys = (
        [(7, 0, i) for i in range(700)] + [(i, 0, 3) for i in range(700)] + [(7, i, 3) for i in range(1, 700)]
    )
    draws: Counter[int] = Counter()
    for seed, choice, position in keys:
        noisy = perturb(processed, temperature=temperature, seed=seed, choice=choice, position=position)
        draws[lowest_argmax(noisy.tolist())] += 1
    statistic, freedom = chi_square(draws, normalised(weights))
    assert statistic <= CHI_SQUARE_001[freedom]


def test_neighbouring_positions_are_independent() -> None:
    processed = process(LOGITS)
    noisy = [perturb(processed, temperature=1.0, seed=3, choice=0, position=p).tolist() for p in range(3000)]
    tokens = [lowest_argmax(row) for row in noisy]
    pairs = Counter(pairwise(tokens))
    total = pairs.total()
    statistic = sum(
        (pairs[a, b] - total * p * q) ** 2 / (total * p * q)
        for a, p in enumerate(PROBS)
        for b, q in enumerate(PROBS)
    )
    assert statistic < 51.2  # chi-square, 24 degrees of freedom, p = 0.001


def test_choose_is_process_perturb_argmax() -> None:
    for seed in range(20):
        params: dict[str, Any] = {"top_k": 3, "temperature": 0.7}
        noisy = perturb(process(LOGITS, **params), temperature=0.7, seed=seed, choice=1, position=4)
        assert choose(LOGITS, seed=seed, choice=1, position=4, **params) == int(noisy.argmax())


def test_temperature_zero_ignores_truncation_and_noise_but_not_penalties() -> None:
    strict: dict[str, Any] = {"top_k": 1, "top_p": 0.01, "min_p": 1.0}
    assert process(LOGITS, temperature=0.0, **strict).tolist() == pytest.approx(LOGITS)
    assert {choose(LOGITS, seed=seed, position=0, temperature=0.0) for seed in range(20)} == {0}
    assert choose(LOGITS, position=0, temperature=0.0, logit_bias={3: 5.0}) == 3


def test_ties_go_to_the_lowest_id() -> None:
    assert choose([0.0, 1.0, 1.0], position=0, temperature=0.0) == 1


def test_small_temperatures_approach_greedy() -> None:
    assert {choose(LOGITS, seed=seed, position=0, temperature=1e-3) for seed in range(50)} == {0}


def test_top_k_keeps_ties_and_is_off_outside_its_range() -> None:
    logits = [1.0, 3.0, 2.0, 2.0, 0.0]
    assert kept(process(logits, top_k=2)) == [1, 2, 3]
    assert kept(process(logits, top_k=1)) == [1]
    for off in (0, -1, 5, 9):
        assert kept(process(logits, top_k=off)) == [0, 1, 2, 3, 4]


def test_top_p_counts_only_the_strictly_more_probable() -> None:
    logits = [math.log(p) for p in (0.25, 0.25, 0.25, 0.125, 0.125)]
    assert kept(process(logits, top_p=0.1)) == [0, 1, 2]
    assert kept(process(logits, top_p=0.74)) == [0, 1, 2]
    assert kept(process(logits, top_p=0.76)) == [0, 1, 2, 3, 4]
    assert kept(process(logits, top_p=1.0)) == [0, 1, 2, 3, 4]
    assert kept(process(logits, top_p=0.0)) == [0, 1, 2]


def test_min_p_is_relative_to_the_best_survivor() -> None:
    assert kept(process(LOGITS, min_p=1.0)) == [0]
    assert kept(process(LOGITS, min_p=0.2)) == [0, 1, 2, 3]
    assert kept(process(LOGITS, min_p=0.2, temperature=0.5)) == [0, 1]


def test_truncation_leaves_the_values_undivided() -> None:
    values = process([4.0, 2.0, -6.0], temperature=2.0, top_k=2).tolist()
    assert values == [4.0, 2.0, -math.inf]


def test_penalties_in_their_order() -> None:
    logits = [2.0, -2.0, 2.0, 1.0]
    values = penalise(
        logits,
        prompt=[0, 0],
        output=[1, 1, 2],
        repetition=2.0,
        frequency=0.25,
        presence=0.5,
        logit_bias={2: 10, 3: 1},
    )
    assert values == [1.0, -4.0 - 0.5 - 0.5, 1.0 - 0.25 - 0.5 + 10, 2.0]


def test_repetition_is_applied_once_to_a_token_of_prompt_and_output() -> None:
    assert penalise([2.0], prompt=[0], output=[0], repetition=2.0) == [1.0]


def test_ban_ends_at_its_position_and_beats_bias() -> None:
    params: dict[str, Any] = {"ban": [0], "ban_until": 5, "logit_bias": {0: 100.0}, "temperature": 0.0}
    assert choose(LOGITS, position=4, **params) == 1
    assert choose(LOGITS, position=5, **params) == 0


def test_draft_log_probs_share_the_noise() -> None:
    """An oracle draft puts the target's own choice first; unreachable tokens stay at -inf."""
    for position in range(30):
        scores = draft_log_probs(LOGITS, seed=9, position=position, temperature=0.8)
        assert scores.exp().sum().item() == pytest.approx(1.0)
        assert int(scores.argmax()) == choose(LOGITS, seed=9, position=position, temperature=0.8)
    cut = draft_log_probs([-math.inf, 1.0, 2.0], seed=9, position=0, temperature=1.0)
    assert cut[0] == -math.inf
    greedy = draft_log_probs(LOGITS, position=0, temperature=0.0)
    assert greedy.exp().tolist() == pytest.approx(PROBS)
