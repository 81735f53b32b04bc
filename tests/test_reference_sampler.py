import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.reference.sampler import choose, draft_log_probs, lowest_argmax, perturb, process

PROBS = (0.40, 0.30, 0.15, 0.10, 0.05)
LOGITS = [math.log(p) for p in PROBS]
CHI_SQUARE_001 = {0: 0.0, 1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47}  # by degrees of freedom, at p = 0.001


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


def test_ties_go_to_the_lowest_id() -> None:
    assert choose([0.0, 1.0, 1.0], position=0, temperature=0.0) == 1


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
