"""Asks the bundled model the 100 held-out questions and counts right answers.

    python -m examples.bundled_model.evaluate [--algorithm EAGLE3] [--quantization int4]

Greedy. An answer is right when the checker accepts it and it ends by itself.
"""

from __future__ import annotations

import argparse
from collections import Counter

from benchmarks.common import write_results
from examples.bundled_model.check_answer import check_answer, load_questions
from specserve import LLM, SamplingParams

MOST_TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", default="EAGLE3", choices=["NONE", "EAGLE", "EAGLE3"])
    parser.add_argument("--quantization", default="none", choices=["none", "fp8", "int8", "int4"])
    args = parser.parse_args()
    rows = load_questions()
    with LLM(speculative_algorithm=args.algorithm, quantization=args.quantization) as llm:
        conversations = [[{"role": "user", "content": row["question"]}] for row in rows]
        answers = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=MOST_TOKENS))
    asked, right = Counter[str](), Counter[str]()
    for row, answer in zip(rows, answers, strict=True):
        good = check_answer(row, answer.text) and answer.finish_reason == "stop"
        asked[row["kind"]] += 1
        right[row["kind"]] += good
        if not good:
            print(f"wrong: {row['question']} -> {answer.text} ({answer.finish_reason})")
    figures = {
        "right": right.total(),
        "asked": asked.total(),
        "by kind": {k: [right[k], n] for k, n in asked.items()},
    }
    print(figures)
    rounded = "" if args.quantization == "none" else f"_{args.quantization}"
    print(write_results(f"bundled_questions{rounded}", figures))


if __name__ == "__main__":
    main()
