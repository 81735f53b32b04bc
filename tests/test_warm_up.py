"""The warm-up that a server on a GPU runs before its first request."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from specserve.core import SamplingParams
from specserve.engine.graphs import Graphs
from specserve.engine.prompts import PROMPT_SIZES
from specserve.engine.runner import Runner
from tests.engines import answer_all, context_of, make_scheduler
from tests.reference.models import make_llama


@pytest.mark.parametrize(
    ("chunk", "context_length", "spans"),
    [
        (8192, 1500, [(0, 72), (0, 72), (1, 64), (1, 128), (1, 1024)]),
        (8192, 600, [(0, 72), (0, 72), (1, 64), (1, 128), (1, 599)]),
        (8192, 50, [(0, 49), (0, 49), (1, 49), (1, 49), (1, 49)]),
        (100, 1500, [(0, 72), (0, 72), (1, 64), (1, 100), (1, 100)]),
    ],
)
def test_prompts_of_all_sizes(
    chunk: int, context_length: int, spans: list[tuple[int, int]], tmp_path: Path
) -> None:
    """From the beginning and after a prefix."""
    target = make_llama(tmp_path / "target", max_positions=2048)
    scheduler = make_scheduler(target, context_length=context_length)
    context, found = context_of(scheduler), []
    plan_prefill = context.attention.plan_prefill

    def planned(chunks):  # type: ignore[no-untyped-def]
        assert chunks.positions_T[0] == chunks.spans[0][0], "where the device has it"
        found.extend(chunks.spans)
        return plan_prefill(chunks)

    with patch.object(type(context.attention), "plan_prefill", lambda _, chunks: planned(chunks)):
        captured: Any = dict.fromkeys(PROMPT_SIZES)  # compiled before: no replay, which None does not have
        Runner(context, Graphs({}, captured)).warm_up(min(chunk, context_length - 1))
    assert found == spans
    assert context.state.slots.length[context.state.dummy] == 1
    params = SamplingParams(temperature=0, max_tokens=8)
    before = answer_all(make_scheduler(target, context_length=context_length), [([3, 1, 4], params)])
    assert answer_all(scheduler, [([3, 1, 4], params)]) == before
