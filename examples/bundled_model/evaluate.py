"""Asks a model the held-out questions and counts right answers: of the bundled one, or of another of its kind.

    python -m examples.bundled_model.evaluate [--algorithm EAGLE3] [--quantization int4]
    python -m examples.bundled_model.evaluate --questions structured --algorithm NONE --model-path DIR

Greedy. An answer to one of the 100 questions is right when the checker accepts it and it ends by itself; of the 60
structured ones, which no grammar helps with, when the calls or the JSON are those that are expected.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.results import write_results
from examples.bundled_model.check_answer import (
    STRUCTURED,
    check_answer,
    check_calls,
    check_json,
    load_questions,
)
from specserve import LLM, SamplingParams
from specserve.config.paths import BUNDLED_DRAFTS
from specserve.methods import NONE

MOST_TOKENS = 256


def ask(llm: LLM, rows: tuple[dict[str, Any], ...]) -> list[tuple[str, str, str, bool]]:
    """The kind of each question, the question, the answer, and whether it is right."""
    params = SamplingParams(temperature=0, max_tokens=MOST_TOKENS)
    answers = llm.chat([[{"role": "user", "content": row["question"]}] for row in rows], params)
    return [
        (
            row["kind"],
            row["question"],
            each.text,
            check_answer(row, each.text) and each.finish_reason == "stop",
        )
        for row, each in zip(rows, answers, strict=True)
    ]


def ask_structured(llm: LLM, rows: tuple[dict[str, Any], ...]) -> list[tuple[str, str, str, bool]]:
    """The same of structured questions; tools are offered for one conversation at a time."""
    params = SamplingParams(temperature=0, max_tokens=MOST_TOKENS)
    found = []
    for row in rows:
        (each,) = llm.chat([row["messages"]], params, tools=row.get("tools"))
        if "calls" in row:
            good = check_calls(row, [(call.name, call.arguments) for call in each.tool_calls])
        else:
            good = check_json(row, each.text)
        found.append((row["kind"], row["messages"][-1]["content"], each.text, good))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", default="plain", choices=["plain", "structured"])
    parser.add_argument("--model-path", help="a model of this folder's recipe (default: the bundled one)")
    parser.add_argument(
        "--algorithm",
        default="EAGLE3",
        choices=[NONE, *(name for name in BUNDLED_DRAFTS if "REST" not in name)],
    )
    parser.add_argument("--quantization", default="none", choices=["none", "fp8", "int8", "int4"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    args = parser.parse_args()
    with LLM(
        args.model_path,
        speculative_algorithm=args.algorithm,
        quantization=args.quantization,
        device=args.device,
    ) as llm:
        if args.questions == "plain":
            answers = ask(llm, load_questions())
        else:
            answers = ask_structured(llm, load_questions(STRUCTURED))
    asked, right = Counter[str](), Counter[str]()
    for kind, question, answer, good in answers:
        asked[kind] += 1
        right[kind] += good
        if not good:
            print(f"wrong: {question} -> {answer}")
    figures = {
        "right": right.total(),
        "asked": asked.total(),
        "by kind": {k: [right[k], n] for k, n in asked.items()},
    }
    print(figures)
    kind = "questions" if args.questions == "plain" else "structured"
    rounded = "" if args.quantization == "none" else f"_{args.quantization}"
    print(write_results(f"bundled_{kind}{rounded}", figures, args.output))


if __name__ == "__main__":
    main()
