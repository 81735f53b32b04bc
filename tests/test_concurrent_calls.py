"""Calls of several threads and tasks at a time: each gets the text that it gets alone."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specserve import LLM, AsyncLLM, SamplingParams
from tests.engines import Checkpoints

PROMPTS = [[5 + index, 17, 40 - index] * (1 + index % 3) for index in range(16)]
PARAMS = [
    SamplingParams(temperature=index % 2, seed=index, max_tokens=12 + index, ignore_eos=True)
    for index in range(len(PROMPTS))
]


@pytest.fixture
def settings(agreeing: Checkpoints) -> dict[str, Any]:
    """An engine with trees, and a pool so small that requests are preempted."""
    return {
        "model_path": str(agreeing.target),
        **agreeing.drafting("EAGLE3", (3, 2, 6)),
        "dtype": "float64",
        "device": "cpu",
        "cpu_threads": 1,
        "skip_tokenizer_init": True,
        "max_total_tokens": 256,
        "context_length": 96,
    }


def test_each_gets_the_text_that_it_gets_alone(settings: dict[str, Any]) -> None:
    with LLM(**settings) as llm:
        alone = [llm.generate(*each)[0].token_ids for each in zip(PROMPTS, PARAMS, strict=True)]
        with ThreadPoolExecutor(8) as threads:
            found = [each[0].token_ids for each in threads.map(llm.generate, PROMPTS, PARAMS)]
        assert found == alone

    async def last(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> list[int]:
        *earlier, last = [each.token_ids async for each in llm.generate(prompt, params)]
        assert all(last[: len(each)] == each for each in earlier)
        return last

    async def ask() -> list[list[int]]:
        async with AsyncLLM(**settings) as llm:
            asked = (last(llm, *each) for each in zip(PROMPTS, PARAMS, strict=True))
            return await asyncio.gather(*asked)

    assert asyncio.run(ask()) == alone
