"""Logits and greedy tokens equal transformers', on random small Llamas of every supported kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

import specserve.engine.executor
from specserve import LLM, SamplingParams
from tests.engines import Checkpoints, answer_all, answer_one, drafting, make_scheduler
from tests.reference.draft_models import make_eagle3
from tests.reference.models import LLAMA3_ROPE, make_llama

MODELS: dict[str, dict[str, Any]] = {
    "grouped heads": {"kv_heads": 2},
    "plain heads": {"kv_heads": 4},
    "one kv head, wide": {"kv_heads": 1, "head_dim": 16},
    "tied": {"tied": True},
    "llama3 rope": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0},
    "llama3 rope, tied, old config": {"rope_scaling": LLAMA3_ROPE, "tied": True, "old_config": True},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}
VOCAB = 20  # as many as log-probabilities are reported
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [17], list(range(20)) * 2]
COUNT = 12
TOLERANCE = 1e-4


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_llama(tmp_path / "target", vocab=VOCAB, seed=3, **MODELS[request.param])


@torch.no_grad()
def their_text(theirs: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the logits ``[COUNT, V]`` that each was chosen from."""
    tokens = list(prompt)
    for _ in range(COUNT):
        tokens.append(int(theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
    logits = theirs(torch.tensor([tokens[:-1]])).logits[0]
    return tokens[len(prompt) :], logits[len(prompt) - 1 :]


def test_greedy_tokens_and_log_probabilities(model: Path) -> None:
    """Through LLM: together in one batch, one prompt split in chunks."""
    params = SamplingParams(temperature=0, max_tokens=COUNT, logprobs=VOCAB)
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    with LLM(str(model), chunked_prefill_size=16, **settings) as llm:
        outputs = llm.generate(PROMPTS, params)
    theirs = AutoModelForCausalLM.from_pretrained(model)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens, logits = their_text(theirs, prompt)
        assert output.token_ids == tokens
        assert output.logprobs is not None
        for entry, row in zip(output.logprobs, logits.log_softmax(-1), strict=True):
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=TOLERANCE)
            found = torch.empty(VOCAB).scatter_(
                0, torch.tensor([t for t, _ in entry.top]), torch.tensor([v for _, v in entry.top])
            )
            torch.testing.assert_close(found, row, atol=TOLERANCE, rtol=0)
            assert [v for _, v in entry.top] == sorted((v for _, v in entry.top), reverse=True)


def test_raw_logits(tmp_path: Path) -> None:
    """Of the prefill's end and of every step, as the sampler gets them."""
    model = make_llama(tmp_path / "target", vocab=VOCAB, seed=3)
    found: list[torch.Tensor] = []
    prefill, step = specserve.engine.executor.prefill, specserve.engine.executor.step

    def recording_prefill(*args: Any) -> Any:
        result = prefill(*args)
        found.append(result.logits_BV[0])
        return result

    def recording_step(*args: Any) -> Any:
        result = step(*args)
        found.append(result.logits_TV[0])
        return result

    prompt = PROMPTS[0]
    with (
        patch.object(specserve.engine.executor, "prefill", recording_prefill),
        patch.object(specserve.engine.executor, "step", recording_step),
    ):
        params = SamplingParams(temperature=0, max_tokens=COUNT)
        (answer,) = answer_all(make_scheduler(model, dtype="float32"), [(prompt, params)])
    tokens, logits = their_text(AutoModelForCausalLM.from_pretrained(model), prompt)
    assert answer.tokens == tokens
    torch.testing.assert_close(torch.stack(found), logits, atol=TOLERANCE, rtol=0)


def test_log_probabilities_of_drafted_text(tmp_path: Path) -> None:
    """Each emitted token has its own entry, whether it was drafted, a bonus or the prompt's first."""
    target = make_llama(tmp_path / "target", vocab=VOCAB, branch_scale=0.04)
    draft = make_eagle3(tmp_path / "draft", target, agree=True)
    params = [
        SamplingParams(temperature=0, max_tokens=COUNT, logprobs=3),
        SamplingParams(temperature=1, seed=4, max_tokens=COUNT),
        SamplingParams(temperature=1, seed=5, max_tokens=COUNT, logprobs=0),
    ]
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    with LLM(str(target), **settings) as llm:
        plain = llm.generate(PROMPTS, params)
    with LLM(str(target), **settings, **drafting("EAGLE3", draft, (4, 2, 8))) as llm:
        drafted = llm.generate(PROMPTS, params)
    assert sum(output.speculation.accepted for output in drafted) > 4
    for ours, theirs in zip(drafted, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        if theirs.logprobs is None:
            assert ours.logprobs is None
            continue
        assert ours.logprobs is not None
        for entry, expected in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert entry.token_id == expected.token_id
            assert entry.logprob == pytest.approx(expected.logprob, abs=TOLERANCE)
            assert [token for token, _ in entry.top] == [token for token, _ in expected.top]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_depends_on_the_size_of_pages(dtype: str, random_models: Checkpoints) -> None:
    """A CPU adds up several scores at a time; pages of one token must leave none over."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    found = [
        answer_one(make_scheduler(random_models.target, dtype=dtype, page_size=size), PROMPTS[0], params)
        for size in (1, 4, 16)
    ]
    assert found[0].logprobs == found[1].logprobs == found[2].logprobs
