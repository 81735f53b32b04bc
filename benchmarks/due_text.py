"""Accepted length of JSON under a schema, with and without drafting of forced text, and of free text.

    python -m benchmarks.due_text [--texts 48]

The bundled model answers the same prompts, greedily and at temperature 0.7, unconstrained and under one of three
schemas. A step is one target forward that emitted tokens; the bonus token counts. All rows have the same texts.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import msgspec

from benchmarks.acceptance import tokens_per_step
from benchmarks.common import write_results
from benchmarks.constrained import PERSON, WEATHER
from specserve import LLM, SamplingParams
from specserve.engine.masks import Masks
from specserve.grammar import json_schema

_NAME = {"type": "string", "maxLength": 12}
BOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "published": {"type": "boolean"},
        "rating": {"enum": ["excellent", "good", "poor"]},
        "author": {
            "type": "object",
            "properties": {"first_name": _NAME, "last_name": _NAME},
            "required": ["first_name", "last_name"],
            "additionalProperties": False,
        },
    },
    "required": ["title", "published", "rating", "author"],
    "additionalProperties": False,
}
SHAPES: list[tuple[str, tuple[int, int, int]]] = [
    ("EAGLE3", (5, 1, 6)),
    ("EAGLE3", (5, 4, 16)),
    ("NGRAM", (5, 1, 6)),
    ("NGRAM", (8, 3, 16)),
    ("EAGLE3+NGRAM", (5, 4, 16)),
]


def measure(count: int) -> list[dict[str, Any]]:
    grammars = [json_schema(schema) for schema in (PERSON, WEATHER, BOOK)]
    prompts = [f"User: Tell me about number {index} as JSON.\nAssistant: " for index in range(count)]
    free = [
        SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=120) for index in range(count)
    ]
    held = [
        msgspec.structs.replace(each, grammar=grammars[index % len(grammars)])
        for index, each in enumerate(free)
    ]
    nothing = patch.object(Masks, "due", lambda *_: [])
    figures: list[dict[str, Any]] = []
    expected: dict[str, list[list[int]]] = {}
    for algorithm, shape in SHAPES:
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        settings: dict[str, Any] = dict(zip(names, shape, strict=True))
        row: dict[str, Any] = {"algorithm": algorithm, "shape": shape}
        with LLM(speculative_algorithm=algorithm, max_running_requests=8, **settings) as llm:
            for name, params, drafts in (
                ("free", free, nullcontext()), ("json", held, nothing), ("json, due text drafted", held, nullcontext())
            ):  # fmt: skip
                with drafts:
                    outputs = llm.generate(prompts, params)
                texts = [output.token_ids for output in outputs]
                kind = name.partition(",")[0]
                assert expected.setdefault(kind, texts) == texts, f"{algorithm}, {name}: another text"
                row[name] = round(tokens_per_step(outputs), 2)
        figures.append(row)
        print(row, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=48)
    args = parser.parse_args()
    print("written to", write_results("due_text", measure(args.texts)))


if __name__ == "__main__":
    main()
