"""Constrained texts: whether they are valid and lossless, and which schemas of a public suite can be enforced."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np

from benchmarks.common import tokens_per_step
from benchmarks.lossless import Models, first_difference, speculation_settings
from benchmarks.results import options, run_command, write_results
from specserve import LLM, SamplingParams, grammar
from specserve.config.paths import BUNDLED_DRAFTS, BUNDLED_MODEL
from specserve.constraints.calls import after_thought
from specserve.constraints.marks import Marks
from specserve.constraints.matcher import GrammarError, Grammars
from specserve.core import Thought
from specserve.frontend.answers import AnswerParser
from specserve.frontend.parsers.base import Arguments, Call, Content, Reasoning, merged
from specserve.frontend.parsers.registry import FORMATS
from specserve.frontend.parsers.think import ThinkParser
from specserve.frontend.tools import Calls, NamedFunction, Tool

MARKS: Mapping[str, int] = {"<tool_call>": 2, "</tool_call>": 3, "<think>": 4, "</think>": 5}
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function | tojson }};{% endfor %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% if opened %}<think>\n{% endif %}{% endif %}"
)


def marked_model(folder: Path, source: Path = BUNDLED_MODEL) -> Path:
    """Write a model, which has the bundled tokenizer, with its special tokens renamed to the marks of tool calls and
    reasoning."""
    for file in source.iterdir():
        if not file.name.startswith("tokenizer"):
            (folder / file.name).symlink_to(file)
    tokenizer = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    names = {token: text for text, token in MARKS.items()}
    for added in tokenizer["added_tokens"]:
        if added["id"] in names:
            before, added["content"], added["special"] = added["content"], names[added["id"]], False
            tokenizer["model"]["vocab"][added["content"]] = tokenizer["model"]["vocab"].pop(before)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def closed(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    """A schema of objects with these properties alone, of which some are required, or all if none is named."""
    names = required or properties
    fields = {"properties": properties, "required": [*names], "additionalProperties": False}
    return {"type": "object", **fields, **more}


PERSON = closed(
    {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    *("name", "age"),
)
WEATHER = closed(
    {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 0, "maximum": 14}},
    "city",
    **{"$defs": {"city": {"enum": ["Rome", "Zürich", "São Paulo"]}}},
)
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
    models: Models, texts: int, speculated: Sequence[str], dtype: str, show: Callable[[str], None]
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
    rows, expected = list[Row](), list[list[int]]()
    ended, invalid = Counter[str](), list[str]()
    for speculation in ("off", *speculated):
        begin = time.perf_counter()
        settings = speculation_settings(models, speculation)
        with LLM(
            str(models.target), dtype=dtype, context_length=256, max_running_requests=16, **settings
        ) as llm:
            answers = llm.generate(prompts, params)
        if not rows:
            expected = [each.token_ids for each in answers]
            for name, answer in zip(labels, answers, strict=True):
                if name != "free" and answer.finish_reason == "stop":
                    ended[name] += 1
                    if not (chosen[name].is_valid(answer.text) and _within(chosen[name], answer.token_ids)):
                        invalid.append(f"{name}: {answer.text!r}")
        different = [i for i, each in enumerate(answers) if each.token_ids != expected[i]]
        for i in different:
            place = first_difference(answers[i].token_ids, expected[i])
            show(f"  {labels[i]}, request {i}: token {place} differs")
        identical, seconds = texts - len(different), time.perf_counter() - begin
        rows.append(Row(speculation, texts, identical, tokens_per_step(answers), seconds))
        show(f"{rows[-1]}")
    return Report(rows, dict(ended), dict(Counter(labels)), invalid)


def main() -> None:
    """Check that constrained texts are valid, and the same with and without speculation.

        python -m benchmarks.constrained --texts 1040 --output benchmarks/results/constrained_float64.json

    Covers JSON schemas, expressions, choices, grammars, reasoning with a budget, and tool calls: required, of one
    function, optional, after reasoning, and in several formats. The bundled model's special tokens serve as the
    marks of calls and reasoning. Texts of each configuration are compared, token for token, with those of plain
    decoding; texts that end by themselves are parsed and checked by ``jsonschema``. At float64 none may differ and
    none may be invalid.
    """
    parser = options(main.__doc__)
    parser.add_argument("--texts", type=int, default=1040, help="answers of each configuration")
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32", "bfloat16"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = Models(marked_model(Path(folder)), BUNDLED_DRAFTS)
        report = run(models, args.texts, SPECULATED, args.dtype, lambda line: print(line, flush=True))
    print(
        f"ended by themselves {sum(report.ended.values())}, of them invalid {len(report.invalid)}: {report.ended}"
    )
    for line in report.invalid:
        print(" ", line)
    if args.output is not None:
        write_results(f"constrained_{args.dtype}", {"dtype": args.dtype, **asdict(report)}, args.output)
    raise SystemExit(0 if report.fine else 1)


DRAFTS = {
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
VOCABULARY, END = 4096, 1
TEXTS, MOST = 6, 150  # of a schema, and tokens of each


class Held:
    """Draw answers of the bundled vocabulary from grammars."""

    def __init__(self) -> None:
        path = BUNDLED_MODEL / "tokenizer.json"
        self._grammars = Grammars(path, VOCABULARY, [END])
        self._tokenizer = llguidance.LLTokenizer(str(path), n_vocab=VOCABULARY, eos_token=[END])
        texts = [self._tokenizer.decode_bytes([token]) for token in range(VOCABULARY)]
        self._closing = np.array([text.strip() in (b"}", b"]", b'"', b",", b":") for text in texts])

    def draw(self, text: str, rng: np.random.Generator) -> str | None:
        """A text of a grammar, None for one that does not end in time. The longer it is the rather it closes."""
        matcher, answer = self._grammars.start(text, []), b""
        for step in range(MOST):
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[:VOCABULARY].astype(bool)
            if bits[END] and (bits.sum() == 1 or rng.random() < 0.1 + step / MOST):
                return answer.decode(errors="replace")
            bits[[0, *range(END, 6)]] = False
            closing = bits & self._closing
            pick = closing if closing.any() and rng.random() < 0.3 + step / MOST else bits
            if not pick.any():
                return None
            token = int(rng.choice(pick.nonzero()[0]))
            matcher.consume([token])
            answer += self._tokenizer.decode_bytes([token])
        return None

    def accepts(self, text: str, written: str) -> bool:
        matcher = llguidance.LLMatcher(self._tokenizer, text)
        tokens = self._tokenizer.tokenize_str(written)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def groups(suite: Path, draft: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted((suite / "tests" / draft).glob("*.json")):
        for group in json.loads(file.read_text()):
            yield file.stem, group


def is_valid(checker: Any, value: Any) -> bool | None:
    """None where jsonschema can't say, as it has no other documents."""
    try:
        return bool(checker.is_valid(value))
    except Exception:
        return None


def measure(suite: Path, draft: str, held: Held) -> dict[str, Any]:
    count, refused, kinds = Counter[str](), Counter[str](), Counter[str]()
    violated: list[str] = []
    for place, (kind, group) in enumerate(groups(suite, draft)):
        schema, name = group["schema"], f"{kind}: {group['description']}"
        if isinstance(schema, dict):  # says which draft it is of
            schema = {"$schema": DRAFTS[draft].META_SCHEMA["$schema"], **schema}
        count["schemas"] += 1
        try:
            text = grammar.json_schema(schema)
        except ValueError as error:
            count["refused"] += 1
            refused[str(error)[:70]] += 1
            continue
        count["taken"] += 1
        kinds[kind] += 1
        checker, rng = DRAFTS[draft](schema), np.random.default_rng(place)
        ended = 0
        for _ in range(TEXTS):
            try:
                drawn = held.draw(text, rng)
            except GrammarError:
                count["drawn without an end"] += 1
                continue
            verdict = None if drawn is None else is_valid(checker, json.loads(drawn))
            ended += verdict is not None
            count["drawn texts that ended"] += verdict is not None
            if verdict is False:
                violated.append(f"{name}: {drawn}")
        count["taken, of which a text ended"] += ended > 0
        narrow = False
        for test in group["tests"]:
            accepted = held.accepts(text, json.dumps(test["data"], ensure_ascii=False))
            count[f"{'valid' if test['valid'] else 'invalid'} instances"] += 1
            narrow |= test["valid"] and not accepted
            if accepted and not test["valid"]:
                violated.append(f"{name}: {json.dumps(test['data'])}")
        count["taken, narrower than the schema"] += narrow
    print(draft, dict(count), f"{len(violated)} violated", sep="\n")
    for each in violated[:40]:
        print("   ", each[:200])
    return {
        "counts": dict(count),
        "share taken": round(count["taken"] / count["schemas"], 3),
        "violated": len(violated),
        "refused for": dict(refused.most_common(12)),
    }


def json_schema() -> None:
    """Count which schemas of a public suite can be enforced, and check that no accepted one lets invalid JSON through.

        git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
        python -m benchmarks.constrained json_schema JSON-Schema-Test-Suite

    A schema is refused, with a reason, or accepted. For an accepted one, texts are drawn from the grammar, token by
    token of the bundled vocabulary and without a model, and those that end are checked by ``jsonschema``. The
    suite's instances are also given to the grammar: accepting an invalid one is a violation; rejecting a valid one
    makes the grammar narrower than the schema. ``format`` is only an annotation in these drafts, as in the suite;
    its optional tests are left out.
    """
    parser = options(json_schema.__doc__)
    parser.add_argument("suite", type=Path)
    args = parser.parse_args()
    held = Held()
    figures = {draft: measure(args.suite, draft, held) for draft in DRAFTS}
    versions = {name: version(name) for name in ("llguidance", "jsonschema")}
    write_results("json_schema", {**versions, **figures}, args.output)


if __name__ == "__main__":
    run_command(main, json_schema)
