"""Accepted length of a draft, of lookup, of both in one tree and of lookahead, on dialogues, code and repeated text.

    python -m benchmarks.copied_text [--prompts 12] [--temperatures 0 0.8]

The bundled model can't edit a given text, so the edit is made in reverse, as in ``benchmarks.prediction``: an edited
copy of the model's own answer to a code prompt precedes the prompt, and a grammar forces that answer, which is not
drafted for that. A step is one target forward that emitted tokens; the bonus token counts. All rows of a workload have
the same texts. A row's workloads run one after the other in one engine, so SUFFIX has already generated the code that
is rewritten.
"""

from __future__ import annotations

import argparse
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from benchmarks.acceptance import tokens_per_step
from benchmarks.common import CODE_TOKENS, load_prompts, write_results
from benchmarks.prediction import before_the_edit
from specserve import LLM, SamplingParams
from specserve.engine.masks import Masks
from specserve.grammar import choice
from specserve.llm import RequestOutput

SHAPES: list[tuple[str, tuple[int, int, int]]] = [
    ("EAGLE3", (5, 1, 6)),
    ("EAGLE3", (5, 4, 16)),
    ("NGRAM", (15, 1, 16)),
    ("NGRAM", (8, 3, 16)),
    ("SUFFIX", (8, 3, 16)),
    ("EAGLE3+NGRAM", (5, 1, 6)),
    ("EAGLE3+NGRAM", (5, 4, 16)),
    ("EAGLE3+SUFFIX", (5, 4, 16)),
    ("LOOKAHEAD", (9, 9, 56)),
]
Work = list[tuple[list[int], SamplingParams]]


def open_llm(algorithm: str, shape: tuple[int, int, int] | None) -> LLM:
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    settings: dict[str, Any] = {} if shape is None else dict(zip(names, shape, strict=True))
    return LLM(speculative_algorithm=algorithm, max_running_requests=1, **settings)


def workloads(count: int, temperature: float) -> dict[str, Work]:
    """Prompts and how they are answered."""
    rows, params = load_prompts(), SamplingParams(temperature=temperature, seed=0, max_tokens=CODE_TOKENS)
    with open_llm("NONE", None) as llm:
        tokenizer = llm.tokenizer
        assert tokenizer is not None
        chats = [tokenizer.encode_chat(row["messages"]) for row in rows if "messages" in row][:count]
        codes = [row["prompt"] for row in rows if "prompt" in row][:count]
        answers = [output.text for output in llm.generate(codes, params)]
        again = [
            (
                tokenizer.encode(f"{before_the_edit(answer)}\n\n\n{code}"),
                replace(params, max_tokens=2 * CODE_TOKENS, grammar=choice([answer])),
            )
            for code, answer in zip(codes, answers, strict=True)
            if answer
        ]
        return {
            "dialogue": [(chat, params) for chat in chats],
            "code": [(tokenizer.encode(code), params) for code in codes],
            "rewriting": again,
        }


def measure(count: int, temperature: float) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    work = workloads(count, temperature)
    expected: dict[str, list[list[int]]] = {}
    for algorithm, shape in SHAPES:
        row: dict[str, Any] = {"algorithm": algorithm, "shape": shape, "temperature": temperature}
        with open_llm(algorithm, shape) as llm, patch.object(Masks, "due", lambda *_: []):
            for name, requests in work.items():
                outputs: list[RequestOutput] = llm.generate(
                    [prompt for prompt, _ in requests], [params for _, params in requests]
                )
                texts = [output.token_ids for output in outputs]
                assert expected.setdefault(name, texts) == texts, f"{algorithm}, {name}: another text"
                row[name] = round(tokens_per_step(outputs), 2)
        figures.append(row)
        print(row, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    args = parser.parse_args()
    figures = [row for temperature in args.temperatures for row in measure(args.prompts, temperature)]
    print("written to", write_results("copied_text", figures))


if __name__ == "__main__":
    main()
