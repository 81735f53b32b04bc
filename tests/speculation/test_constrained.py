"""``benchmarks.constrained`` in small, and that it detects errors."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("llguidance")

from benchmarks.configurations import SPECULATION
from benchmarks.constrained import MARKS, Report, Row, kinds, marked_model, run
from benchmarks.lossless import Models
from specserve import LLM, SamplingParams, grammar
from specserve.constraints.calls import after_thought
from specserve.constraints.marks import Marks
from specserve.core import Thought
from specserve.frontend.tokenizer import byte_alphabet
from tests.engines import Checkpoints, drafting


@pytest.fixture
def models(small_chat: Checkpoints, tmp_path: Path) -> Models:
    return Models(marked_model(tmp_path, small_chat.target), small_chat.drafts)


def test_calls_and_forms_are_valid_and_those_of_plain_decoding(models: Models) -> None:
    """In float64, in batches with free requests, in small trees; ``benchmarks.constrained`` has more of them."""
    lines: list[str] = []
    with patch.dict(SPECULATION, {"small": ("EAGLE3", 3, 2, 6)}):
        report = run(models, 24, ("small",), "float64", lines.append)
    assert report.fine, (lines, report.invalid)
    assert sum(report.ended.values()) > 8
    assert set(report.texts_by_kind) == {*kinds(), "free"}
    assert max(row.mean_accepted_length for row in report.rows) > 1.2


def test_budgets_hold_through_preemptions(models: Models) -> None:
    """In a pool so small that requests are put back while they think."""
    close, grammar = MARKS["</think>"], kinds()["after an opened one"].grammar
    thought = Thought(open="<think>", close="</think>", end=[226, close], begun=True)
    params = [
        SamplingParams(
            thinking_token_budget=(3, 9, 14)[index % 3],
            thought=thought,
            seed=index,
            max_tokens=40,
            temperature=index % 2,
            grammar=grammar if index % 4 == 3 else None,
        )
        for index in range(12)
    ]
    found = []
    small = {"max_running_requests": 6, "max_total_tokens": 160, "page_size": 4}
    for settings in ({}, {"speculative_algorithm": "NGRAM", **small}):
        with LLM(str(models.target), dtype="float64", cpu_threads=1, context_length=128, **settings) as llm:
            answers = llm.generate(["User: one, please. Assistant:<think>"] * len(params), params)
        found.append([answer.token_ids for answer in answers])
    assert found[0] == found[1]
    ends = [tokens.index(close) for tokens in found[0] if close in tokens]
    assert len(ends) > 6
    assert max(ends) == 15
    with (
        LLM(str(models.target), cpu_threads=1) as llm,
        pytest.raises(ValueError, match=r"thinking_token_budget: not supported"),
    ):
        llm.generate("a", SamplingParams(thinking_token_budget=3))


def test_budgets_that_end_within_a_character(models: Models) -> None:
    """The answer goes on after the mark, and is the same with drafts, in trees, and when it is computed again."""
    letters = json.loads((models.target / "tokenizer.json").read_text())["model"]["vocab"]
    char_of = {each[0]: char for char, each in byte_alphabet().items()}
    bias = {letters[char_of[byte]]: weight for byte, weight in zip("€".encode(), (40, 39, 38), strict=True)}
    thought = Thought(open="<think>", close="</think>", end=[letters["Ċ"], MARKS["</think>"]], begun=True)
    form = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
    json_form = after_thought(
        grammar.json_schema({**form, "additionalProperties": False}), Marks(MARKS), True
    )
    params = [
        SamplingParams(
            thinking_token_budget=1 + index % 7,
            thought=thought,
            seed=index,
            max_tokens=60,
            temperature=index % 2,
            grammar=kinds()["after an opened one"].grammar if index % 3 else json_form,
            logit_bias=bias,
        )
        for index in range(8)
    ]
    small = {"max_running_requests": 6, "max_total_tokens": 160, "page_size": 4}
    found: list[list[str]] = []
    for settings in (
        {},
        {"speculative_algorithm": "NGRAM", **small},
        drafting("EAGLE3", models.drafts["EAGLE3"], (3, 2, 6)),
    ):
        with LLM(str(models.target), dtype="float64", cpu_threads=1, context_length=128, **settings) as llm:
            answers = llm.generate(["User: one, please. Assistant:<think>"] * len(params), params)
        found.append([answer.text for answer in answers])
    assert found[0] == found[1] == found[2]
    assert sum("\ufffd\n</think>" in text for text in found[0]) > 3
    for index, text in enumerate(found[0]):
        said = text.partition("\n</think>")[2]
        assert said.strip().startswith("<tool_call>") if index % 3 else isinstance(json.loads(said)["a"], int)


def test_what_ends_a_thought_and_may_not_end_the_answer(models: Models) -> None:
    close = MARKS["</think>"]
    thought = Thought(open="<think>", close="</think>", end=[226, close], begun=True)
    given = {"thinking_token_budget": 3, "thought": thought, "max_tokens": 24, "temperature": 0}
    with LLM(str(models.target), cpu_threads=1) as llm:
        prompt = "User: one, please. Assistant:<think>"
        for fields in ({"stop_token_ids": [close]}, {"stop_token_ids": [226], "ignore_eos": True}):
            with pytest.raises(ValueError, match=r"min_tokens: token \d+ ends both the answer and"):
                llm.generate(prompt, SamplingParams(min_tokens=20, **given, **fields))
            assert llm.generate(prompt, SamplingParams(**given, **fields))[0].finish_reason == "stop"
        (free,) = llm.generate(prompt, SamplingParams(min_tokens=20, **given))
    assert len(free.token_ids) >= 20
    assert free.token_ids[free.token_ids.index(226) :][:2] == [226, close]


def test_what_is_not_valid() -> None:
    wrong = {
        "schema": '{"name": "a"}',
        "required": "<tool_call>{}</tool_call>",
        "required, one": '<tool_call>{"name": "now", "arguments": {}}</tool_call>' * 2,
        "strict": '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>',
        "after an opened one": '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "llama3_json, strict": '{"name": "weather", "parameters": {"city": "Oslo"}}',
        "qwen3_coder": "<tool_call><function=person><parameter=name>A</parameter></function></tool_call>",
        "pythonic": '[weather(city="Oslo")]',
    }
    for name, text in wrong.items():
        assert not kinds()[name].is_valid(text), name
    row = Row("off", 2, 2, 1.0, 0.0)
    assert Report([row], {}, {}, []).fine
    assert not Report([row], {}, {}, ["a"]).fine
    assert not Report([row, Row("EAGLE", 2, 1, 1.0, 0.0)], {}, {}, []).fine
