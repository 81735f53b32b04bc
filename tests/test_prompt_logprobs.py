"""Log-probabilities of a prompt's tokens: correct, and the same however the prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch

from specserve import LLM, SamplingParams
from specserve.core import TokenLogprob
from specserve.speculation import logprobs
from tests.engines import Checkpoints, Client, answer_all, answer_one

PROMPT = [3, 9, 27, 17, 51, 25, 11, 33, 35, 41, 59, 49, 19, 57, 43, 1, 3, 9, 27, 17]
SCORED = SamplingParams(max_tokens=16, temperature=0, prompt_logprobs=3, logprobs=0, ignore_eos=True)


def values(found: Sequence[TokenLogprob]) -> list[float]:
    return [item.logprob for item in found]


def test_as_transformers(agreeing: Checkpoints) -> None:
    from transformers import AutoModelForCausalLM

    prompts = [[(7 * i * i + 3 * i) % 64 for i in range(100)], [7, 8], [9]]
    model = AutoModelForCausalLM.from_pretrained(agreeing.target, dtype=torch.float32).eval()
    scheduler = agreeing.scheduler("EAGLE3", (3, 2, 6), dtype="float32", chunked_prefill_size=32)
    # Few rows at a time, so that a chunk's logits come in several parts.
    with patch.object(logprobs, "SLICE", 5 * model.config.vocab_size):
        answer_all(
            scheduler, [(prompt, SamplingParams(max_tokens=2)) for prompt in prompts]
        )  # fills the cache
        params = SamplingParams(max_tokens=0, prompt_logprobs=2)
        answers = answer_all(scheduler, [(prompt, params) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        assert (answer.tokens, answer.finish_reason, answer.cached_tokens) == ([], "length", 0)
        assert [item.token_id for item in answer.scores] == prompt[1:]
        own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert values(answer.scores) == pytest.approx(own, abs=1e-4)
        tops = [[value for _, value in item.top] for item in answer.scores]
        assert tops == [pytest.approx(each, abs=1e-4) for each in expected.topk(2).values.tolist()]


def test_of_the_library(agreeing: Checkpoints) -> None:
    settings = {"device": "cpu", "dtype": "float64", "skip_tokenizer_init": True}
    with LLM(str(agreeing.target), **settings) as llm:  # type: ignore[arg-type]
        without, asked = llm.generate([PROMPT] * 2, [SamplingParams(max_tokens=2), SCORED])
    assert without.prompt_logprobs is None
    assert asked.prompt_logprobs is not None
    assert [item.token_id for item in asked.prompt_logprobs] == PROMPT[1:]
    assert all(len(item.top) == 3 for item in asked.prompt_logprobs)


def test_however_it_is_computed(agreeing: Checkpoints) -> None:
    """Chunks, drafts, neighbours, cached prefixes, and preemption, also in the middle of a prompt, change nothing."""
    plain = answer_one(agreeing.scheduler("EAGLE3", (1, 1, 2), max_running_requests=1), PROMPT, SCORED)
    assert len(plain.scores) == len(PROMPT) - 1
    prompts = [PROMPT, [*PROMPT[:8], 5, 5], PROMPT, PROMPT]
    for algorithm, chunk, pool in (("EAGLE", 16, 4096), ("EAGLE3", 16, 80), ("EAGLE3", 512, 80)):
        scheduler = agreeing.scheduler(
            algorithm,
            (3, 2, 6),
            page_size=4,
            max_running_requests=4,
            chunked_prefill_size=chunk,
            max_total_tokens=pool,
        )
        for _ in range(2):
            answers = answer_all(scheduler, [(prompt, SCORED) for prompt in prompts])
            for index in (0, 2, 3):
                assert answers[index].tokens == plain.tokens
                assert values(answers[index].scores) == pytest.approx(values(plain.scores), abs=1e-9)
                assert values(answers[index].logprobs) == pytest.approx(values(plain.logprobs), abs=1e-9)
            assert values(answers[1].scores)[:7] == pytest.approx(values(plain.scores)[:7], abs=1e-9)
        assert (scheduler.stats().preemptions > 0) == (pool == 80)
        assert not scheduler.memory.problems()


def test_put_back_in_the_middle_of_a_prompt(agreeing: Checkpoints) -> None:
    """What was told of computed tokens stays; the cache gives back no more than that."""
    scheduler = agreeing.scheduler(
        "EAGLE3", (3, 2, 6), page_size=4, chunked_prefill_size=8, overlap_schedule="off"
    )
    expected = answer_one(scheduler, PROMPT, SCORED)
    scheduler.flush_cache()
    client = Client(scheduler)
    client.submit("a", PROMPT, SCORED)
    client.iterate()
    (request,) = scheduler.running
    assert (request.prefilled, len(request.scores or ())) == (8, 8)
    scheduler.preempt(request)
    client.iterate()
    assert request.cached_tokens == 0
    assert request.prefilled == 16, "the first 8 came from the cache"
    (answer,) = client.run().values()
    assert values(answer.scores) == pytest.approx(values(expected.scores), abs=1e-9)
    assert answer.tokens == expected.tokens


def test_bounds() -> None:
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ValueError, match=rf"{name} must be in \[0, 20\], found 21"):
            SamplingParams(**{name: 21})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"max_tokens must be in \[0"):
        SamplingParams(max_tokens=-1)
    with pytest.raises(ValueError, match=r"min_tokens must be in \[0, 0\], found 1"):
        SamplingParams(max_tokens=0, min_tokens=1)
