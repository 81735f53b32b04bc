"""Check that constrained texts are valid, and the same with and without speculation.

    python -m benchmarks.constrained --texts 1040 --output benchmarks/results/constrained_float64.json

Covers JSON schemas, expressions, choices, grammars, reasoning with a budget, and tool calls: required, of one function,
optional, after reasoning, and in several formats. The bundled model's special tokens serve as the marks of calls and
reasoning. Texts of each configuration are compared, token for token, with those of plain decoding; texts that end by
themselves are parsed and checked by ``jsonschema``. At float64 none may differ and none may be invalid.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.common import write_results
from benchmarks.lossless import SPECULATION, first_difference
from benchmarks.marked import MARKS, marked_model
from specserve import LLM, SamplingParams, grammar
from specserve.config.paths import BUNDLED_DRAFTS
from specserve.core import Thought
from specserve.frontend.enforce import Calls, Marks, after_thought
from specserve.frontend.parsers.base import Arguments, Call, Content, Reasoning, merged
from specserve.frontend.parsers.registry import FORMATS, AnswerParser
from specserve.frontend.parsers.think import ThinkParser
from specserve.frontend.tools import NamedFunction, Tool

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Zürich", "São Paulo"]}},
}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}, "leaf": {"type": "boolean"}},
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "maxProperties": 0}
SCHEMAS = {"person": PERSON, "weather": WEATHER, "tree": TREE, "now": NOTHING}
VERSION = r"v[0-9]{1,2}\.[0-9]{1,2}( beta)?"
CITIES = ["Paris", "Pisa", "Porto, in Portugal"]
ENDS = [1]
BRACE, BRACKET = 96, 64  # tokens of the bundled model
CALL, THINK, CLOSE = MARKS["<tool_call>"], MARKS["<think>"], MARKS["</think>"]
TEMPERATURES = (0.0, 0.7, 1.0, 1.3)
SPECULATED = ("EAGLE3 chain", "EAGLE3 tree of 16", "NGRAM tree", "EAGLE3 chain + NGRAM")


@dataclass(frozen=True)
class Kind:
    """A grammar, a check whether a text is valid, what makes the model do different things under the grammar, and the
    maximum number of reasoning tokens if the prompt has opened the reasoning."""

    grammar: str | None
    is_valid: Callable[[str], bool]
    bias: Mapping[int, float] | None = None
    budget: int | None = None


def kinds() -> dict[str, Kind]:
    """All that an answer can be held to."""
    free, one = {CALL: 15.0}, {"parallel": False}
    return {
        "schema": Kind(grammar.json_schema(PERSON), lambda text: _valid(json.loads(text), PERSON)),
        "regex": Kind(grammar.regex(VERSION), lambda text: re.fullmatch(VERSION, text) is not None),
        "choice": Kind(grammar.choice(CITIES), CITIES.__contains__),
        "lark": Kind(
            grammar.lark('start: "[" item ("," item)* "]"\nitem: /[a-c]{1,3}/'),
            lambda text: re.fullmatch(r"\[[abc]{1,3}(,[abc]{1,3})*\]", text) is not None,
        ),
        "required": _calls("hermes", choice="required"),
        "required, one": _calls("hermes", choice="required", **one),
        "named": _calls("hermes", choice=_named("tree"), bias=None),
        "strict": _calls("hermes", choice="auto", bias=free),
        "strict, one": _calls("hermes", choice="auto", bias=free, **one),
        "after a thought": _calls("hermes", "", choice="required", bias={THINK: 30.0, CLOSE: 29.0}, **one),
        "after an opened one": _calls("hermes", "<think>", choice="required", bias={CLOSE: 14.0}, **one),
        "a thought of 0": Kind(None, _is_thought, budget=0),
        "a thought of 9": Kind(None, _is_thought, budget=9),
        "after a thought of 5": _calls("hermes", "<think>", choice="required", budget=5, **one),
        "llama3_json": _calls("llama3_json", choice="required", **one),
        "llama3_json, strict": _calls("llama3_json", choice="auto", bias={BRACE: 12.0}, **one),
        "qwen3_coder": _calls("qwen3_coder", choice="required", **one),
        "qwen3_coder, strict": _calls("qwen3_coder", choice="auto", bias=free, **one),
        "pythonic": _calls("pythonic", choice="required", **one),
        "pythonic, strict": _calls("pythonic", choice="auto", bias={BRACKET: 6.0}, **one),
        "mistral": _calls("mistral", choice="required", **one),
    }


def _named(name: str) -> NamedFunction:
    return NamedFunction.model_validate({"type": "function", "function": {"name": name}})


def _calls(
    format_: str,
    prompt: str | None = None,
    *,
    choice: Any,
    parallel: bool | None = None,
    bias: Mapping[int, float] | None = None,
    budget: int | None = None,
) -> Kind:
    """Calls in a format, after a thought that may come, or one that ``prompt`` begins."""
    tools = [
        Tool.model_validate(
            {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        )
        for name, schema in SCHEMAS.items()
        if name != "now"
    ]
    tools.append(Tool.model_validate({"type": "function", "function": {"name": "now"}}))
    marks = Marks({"<|begin|>": 0, "<|end|>": 1, **MARKS}, ENDS)
    calls = Calls(tools, choice, parallel)
    text = calls.grammar(FORMATS[format_], marks)
    if prompt is not None:
        text = after_thought(text, marks, bool(prompt))
    must, most = choice != "auto", 1 if parallel is False or not isinstance(choice, str) else 1000

    def is_valid(answer: str) -> bool:
        thought = None if prompt is None else ThinkParser(prompt)
        reader = FORMATS[format_].parser(SCHEMAS)
        reader.either = calls.calls_or_text(FORMATS[format_])
        parser = AnswerParser(thought, reader)
        events = merged([*parser.feed(answer), *parser.finish()])
        names = [event.name for event in events if isinstance(event, Call)]
        given = [json.loads(event.text) for event in events if isinstance(event, Arguments)]
        told = not must or not any(isinstance(event, Content) for event in events)
        told = told and (prompt != "<think>" or isinstance(events[0], Reasoning | Call))
        held = all(
            _valid(arguments, {**SCHEMAS[name], "type": "object"})
            for name, arguments in zip(names, given, strict=True)
            if must or name != "now"
        )
        return told and held and int(must) <= len(names) <= most

    return Kind(text, is_valid, bias, budget)


def _is_thought(answer: str) -> bool:
    """An answer that begins with one may be all of it."""
    events = AnswerParser(ThinkParser("<think>")).feed(answer)
    return not events or isinstance(events[0], Reasoning | Content)


def _within(kind: Kind, token_ids: Sequence[int]) -> bool:
    """Whether the mark that ends the thought comes in time: after the budget and a line break."""
    if kind.budget is None:
        return True
    return CLOSE in token_ids[: kind.budget + 2] or len(token_ids) < kind.budget + 2


def _valid(value: Any, schema: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@dataclass(frozen=True)
class Row:
    """One configuration's outcome."""

    speculation: str
    texts: int
    identical: int
    mean_accepted_length: float
    seconds: float


@dataclass(frozen=True)
class Report:
    """``ended``: texts by kind that ended by themselves; ``invalid``: those among them that are invalid."""

    rows: list[Row]
    ended: dict[str, int]
    texts_by_kind: dict[str, int]
    invalid: list[str]

    @property
    def fine(self) -> bool:
        return not self.invalid and all(row.identical == row.texts for row in self.rows)


def run(
    model: Path, texts: int, speculated: Sequence[str], dtype: str, show: Callable[[str], None]
) -> Report:
    """Answer ``texts`` requests plainly and under each configuration. Every eighth request is free."""
    chosen = kinds()
    names = [*chosen]
    prompts, params, labels = [], [], []
    for index in range(texts):
        name = "free" if index % 8 == 7 else names[(index - index // 8) % len(names)]
        kind = chosen.get(name)
        labels.append(name)
        prompts.append(f"User: number {index}, please.\nAssistant: ")
        params.append(
            SamplingParams(
                temperature=TEMPERATURES[index % len(TEMPERATURES)],
                seed=2**33 + index,
                max_tokens=80,
                repetition_penalty=1.1 if index % 5 == 3 else 1.0,
                grammar=None if kind is None else kind.grammar,
                thinking_token_budget=None if kind is None else kind.budget,
                thought=Thought(open="<think>", close="</think>", end=[226, CLOSE], begun=True),
                logit_bias=None if kind is None or kind.bias is None else dict(kind.bias),
            )
        )
    rows, expected = [], []
    ended, invalid = Counter[str](), []
    for speculation in ("off", *speculated):
        begin = time.perf_counter()
        with LLM(
            str(model), dtype=dtype, context_length=256, max_running_requests=16, **_settings(speculation)
        ) as llm:
            found = llm.generate(prompts, params)
        if not rows:
            expected = [each.token_ids for each in found]
            for name, answer in zip(labels, found, strict=True):
                if name != "free" and answer.finish_reason == "stop":
                    ended[name] += 1
                    if not (chosen[name].is_valid(answer.text) and _within(chosen[name], answer.token_ids)):
                        invalid.append(f"{name}: {answer.text!r}")
        different = [i for i, each in enumerate(found) if each.token_ids != expected[i]]
        for i in different:
            place = first_difference(found[i].token_ids, expected[i])
            show(f"  {labels[i]}, request {i}: token {place} differs")
        steps = sum(each.speculation.steps for each in found)
        accepted = 1 + sum(each.speculation.accepted for each in found) / max(steps, 1)
        rows.append(Row(speculation, texts, texts - len(different), accepted, time.perf_counter() - begin))
        show(f"{rows[-1]}")
    return Report(rows, dict(ended), dict(Counter(labels)), invalid)


def _settings(name: str) -> dict[str, Any]:
    if (speculation := SPECULATION[name]) is None:
        return {}
    algorithm, steps, topk, tokens = speculation
    draft = BUNDLED_DRAFTS.get(algorithm.partition("+")[0])
    return {
        "speculative_algorithm": algorithm,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": tokens,
        **({} if draft is None else {"speculative_draft_model_path": str(draft)}),
    }


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=1040, help="answers of each configuration")
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32", "bfloat16"])
    parser.add_argument("--output", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = marked_model(Path(folder))
        report = run(model, args.texts, SPECULATED, args.dtype, lambda line: print(line, flush=True))
    print(
        f"ended by themselves {sum(report.ended.values())}, of them invalid {len(report.invalid)}: {report.ended}"
    )
    for line in report.invalid:
        print(" ", line)
    if args.output is not None:
        write_results(f"constrained_{args.dtype}", {"dtype": args.dtype, **asdict(report)}, args.output)
    raise SystemExit(0 if report.fine else 1)


if __name__ == "__main__":
    main()
