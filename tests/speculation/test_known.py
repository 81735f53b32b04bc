"""Texts that are known beforehand are what every shape writes."""

from __future__ import annotations

import pytest
import torch

from specserve.core import SamplingParams
from specserve.speculation.known import UNKNOWN, KnownTexts
from tests.engines import Checkpoints, answer_all, context_of, make_scheduler

PROMPTS = [[5, 6, 7], [9, 10, 4, 4]]
GREEDY = SamplingParams(temperature=0, max_tokens=19, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=4, max_tokens=19, ignore_eos=True)
Shape = tuple[int, int, int] | None


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [None, (3, 1, 4), (3, 2, 9)], ids=str)
def test_a_known_text_is_written(agreeing: Checkpoints, shape: Shape, params: SamplingParams) -> None:
    """Also where it is none that the target would choose, up to where it ends; other prompts have their own."""
    items = [(prompt, params) for prompt in PROMPTS]
    usual, other = answer_all(make_scheduler(agreeing.target), items)
    text = [*usual.tokens[:7], *(4 + token % 7 for token in usual.tokens[7:12])]
    scheduler = agreeing.scheduler("EAGLE3", shape) if shape else make_scheduler(agreeing.target)
    texts = context_of(scheduler).state.know_texts(64)
    texts.know(PROMPTS[0], params, text)
    texts.know(PROMPTS[0], params, text[::-1])  # the first one stands
    found = answer_all(scheduler, items)
    assert found[0].tokens[:12] == text
    assert len(found[0].tokens) == len(usual.tokens)
    assert found[1].tokens == other.tokens
    if shape and params is GREEDY:
        assert max(found[0].runs[:3]) > 1, "what agrees with it is accepted"


def test_texts_end_where_the_table_does(agreeing: Checkpoints) -> None:
    (usual,) = answer_all(make_scheduler(agreeing.target), [(PROMPTS[0], GREEDY)])
    text = [4 + token % 7 for token in usual.tokens]
    scheduler = agreeing.scheduler("EAGLE3", (3, 1, 4))
    context_of(scheduler).state.know_texts(3 + 5).know(PROMPTS[0], GREEDY, text)
    (found,) = answer_all(scheduler, [(PROMPTS[0], GREEDY)])
    assert found.tokens[:5] == text[:5]
    (expected,) = answer_all(
        make_scheduler(agreeing.target),
        [(PROMPTS[0] + text[:5], SamplingParams(temperature=0, max_tokens=14))],
    )
    assert found.tokens[5:] == expected.tokens


def test_a_row_forgets_the_text_before(agreeing: Checkpoints) -> None:
    scheduler = make_scheduler(agreeing.target, max_running_requests=1)
    context_of(scheduler).state.know_texts(64).know(PROMPTS[0], GREEDY, [8] * 19)
    found = answer_all(scheduler, [(prompt, GREEDY) for prompt in PROMPTS])
    (expected,) = answer_all(make_scheduler(agreeing.target), [(PROMPTS[1], GREEDY)])
    assert found[0].tokens == [8] * 19
    assert found[1].tokens == expected.tokens


def test_what_has_no_seed_can_t_be_known() -> None:
    texts, unseeded = KnownTexts(2, 8, torch.device("cpu")), SamplingParams(temperature=1)
    with pytest.raises(ValueError, match="seed: a text that is sampled without one"):
        texts.know([1, 2], unseeded, [3])
    texts.know([1, 2], GREEDY, [3])
    texts.admit(0, [1, 2], unseeded, 0, [])
    assert (texts.tokens_RP == UNKNOWN).all(), "the greedy text is not its"


def test_who_gets_a_text() -> None:
    """The answer that it was of; and a request that comes back only if it has written nothing else."""
    texts = KnownTexts(2, 8, torch.device("cpu"))
    texts.know([1, 2], SAMPLED, [3, 4, 5])

    def row(choice: int, output: list[int]) -> list[int]:
        texts.admit(1, [1, 2], SAMPLED, choice, output)
        return texts.tokens_RP[1, 2:5].tolist()

    assert row(0, []) == row(0, [3, 4]) == row(0, [3, 4, 5, 9]) == [3, 4, 5]
    assert row(1, []) == row(0, [3, 7]) == [UNKNOWN] * 3
