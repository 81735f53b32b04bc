"""Answers with a grammar are valid, and equal plain decoding with every drafter."""

from __future__ import annotations

import datetime
import json
import random
import re
import threading
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import jsonschema
import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from pydantic import BaseModel

from specserve import LLM, SamplingParams, grammar
from specserve.config import Settings, make_settings
from specserve.config.paths import BUNDLED_MODEL
from specserve.constraints.grammar import MOST
from specserve.constraints.matcher import Constraint, GrammarError, Grammars, Matcher
from specserve.core import Thought
from specserve.frontend.tokenizer import Tokenizer
from specserve.process.assemble import create_scheduler, resolve_engine
from specserve.speculation.control.cost import CostModel
from tests.engines import Checkpoints, Client, answer_one, make_scheduler

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
VERSION = r"v[0-9]{1,2}\.[0-9]{1,2}( beta)?"
CITIES = ["Paris", "Pisa", "Porto, in Portugal"]
GRAMMARS = {
    "schema": grammar.json_schema(PERSON),
    "regex": grammar.regex(VERSION),
    "choice": grammar.choice(CITIES),
    "lark": grammar.lark('start: "[" item ("," item)* "]"\nitem: /[a-c]{1,3}/'),
}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"speculative_algorithm": "EAGLE3", "shape": (4, 1, 5)},
    "tree": {"speculative_algorithm": "EAGLE3", "shape": (3, 3, 8)},
    "ngram": {"speculative_algorithm": "NGRAM", "shape": (4, 2, 9)},
    "adaptive": {"speculative_algorithm": "EAGLE"},
}


def is_valid(kind: str, text: str) -> bool:
    if kind == "schema":
        jsonschema.validate(json.loads(text), PERSON)
        return True
    if kind == "choice":
        return text in CITIES
    pattern = VERSION if kind == "regex" else r"\[[abc]{1,3}(,[abc]{1,3})*\]"
    return re.fullmatch(pattern, text) is not None


def requests() -> list[tuple[str, str, SamplingParams]]:
    """Kind, prompt and parameters; every fifth is free."""
    made = []
    for index in range(10):
        kind = "free" if index % 5 == 4 else [*GRAMMARS][index % 4]
        params = SamplingParams(
            temperature=[0.0, 0.8, 1.3][index % 3],
            seed=index,
            max_tokens=60,
            grammar=GRAMMARS.get(kind),
            repetition_penalty=1.1 if index % 4 == 3 else 1.0,
        )
        made.append((kind, f"User: number {index}, please.\nAssistant: ", params))
    return made


def answers(**settings: Any) -> list[tuple[str, str | None]]:
    shape = settings.pop("shape", None)
    if shape is not None:
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        settings |= dict(zip(names, shape, strict=True))
    _, prompts, params = zip(*requests(), strict=True)
    with LLM(dtype="float64", cpu_threads=1, context_length=256, **settings) as llm:
        found = llm.generate(list(prompts), list(params))
    return [(each.text, each.finish_reason) for each in found]


@pytest.fixture(scope="module")
def plain() -> list[tuple[str, str | None]]:
    return answers()


def test_every_answer_that_ends_is_valid(plain: list[tuple[str, str | None]]) -> None:
    ended = 0
    for (kind, _, _), (text, reason) in zip(requests(), plain, strict=True):
        if kind != "free" and reason == "stop":
            assert is_valid(kind, text), (kind, text)
            ended += 1
    assert ended >= 5


@pytest.mark.parametrize(
    ("how", "overlap"),
    [("chain", "off"), ("tree", "on"), ("ngram", "on"), ("adaptive", "off")],
)
def test_drafts_change_no_text(how: str, overlap: str, plain: list[tuple[str, str | None]]) -> None:
    """In batches of 6, with and without a pool so small that requests are put back."""
    room = {"max_total_tokens": 1024} if overlap == "on" else {}
    found = answers(**SHAPES[how], max_running_requests=6, overlap_schedule=overlap, page_size=4, **room)
    assert found == plain


RECURSIVE = {
    "brackets": 'start: s\ns: "(" s ")" | "x" | s s |',
    "a limit of tokens": "start: a\na[max_tokens=3]: /[a-z]*/",
    "a schema of itself": grammar.json_schema({"$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
                                               "type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}),
}  # fmt: skip


@pytest.mark.parametrize("name", [*GRAMMARS, *RECURSIVE])
def test_masks_of_a_tree_are_those_of_its_paths(name: str) -> None:
    """Whatever the order of branches, and however often a matcher is asked; of tokens that may not be where they are
    none is needed."""
    grammars, text = Grammars(BUNDLED_MODEL / "tokenizer.json", 4096, [0], 3), {**GRAMMARS, **RECURSIVE}[name]
    rng, output = random.Random(0), []
    for _ in range(4):
        grammars.compile(text).result()
    live = grammars.start(text, [])
    for _ in range(12):
        tokens, parents, paths = [0], [0], [[]]
        for node in range(1, 20):
            parent = rng.randrange(node)
            path = paths[parent]
            allowed = [] if path is None else _bits(grammars.start(text, [*output, *path]).mask())
            token = int(rng.choice(allowed)) if len(allowed) and rng.random() < 0.8 else rng.randrange(4096)
            tokens.append(token)
            parents.append(parent)
            paths.append([*path, token] if path is not None and token in allowed and token != 0 else None)
        found = masks(grammars, live, tokens, parents)
        for mask, path in zip(found, paths, strict=True):
            if path is not None:
                assert np.array_equal(mask, grammars.start(text, [*output, *path]).mask())
        more = rng.choice([path for path in paths if path is not None])[:2]
        live.consume(more)
        output += more


def test_several_answers_of_a_grammar_are_looked_at_at_once() -> None:
    """By threads, each with tables of its own: what one of them does is seen by no other."""
    grammars, rng = Grammars(BUNDLED_MODEL / "tokenizer.json", 4096, [0], threads=4), random.Random(0)
    names = ["schema", "lark", "schema", "schema", "regex", "schema", "schema"]
    for name in names:
        grammars.compile(GRAMMARS[name]).result()
    outputs: list[list[int]] = [[] for _ in names]
    live = [grammars.start(GRAMMARS[name], []) for name in names]
    for _ in range(8):
        words = torch.zeros(len(names), grammars.words, dtype=torch.int32)
        trees = [(index, each.after_nodes([0], [0])) for index, each in enumerate(live)]
        assert grammars.fill(trees, words) == [{}] * len(names)
        for name, each, output, found in zip(names, live, outputs, words.numpy(), strict=True):
            assert np.array_equal(found, grammars.start(GRAMMARS[name], output).mask())
            if token := int(rng.choice(_bits(found))):
                each.consume([token])
                output.append(token)


def test_forced_text_is_cut_and_followed() -> None:
    """However long it is, little of it is split, and what is left of that is not split again."""
    text = "".join(f"This is sentence {i}, and no other may be said. " for i in range(2000))
    grammars = Grammars(BUNDLED_MODEL / "tokenizer.json", 4096, [0])
    whole = tokenizers.Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    first, ids = grammar.choice([text]), whole.encode(text, add_special_tokens=False).ids
    matcher = grammars.start(first, [])
    assert matcher.forced(8) == ids[:8]
    matcher.consume(ids[:3])
    assert matcher.forced(8) == ids[3:8]
    matcher.consume(ids[3:8])
    assert matcher.forced(8) == ids[8:16]
    near = grammars.start(first, ids[:-4])
    assert near.forced(8) == [*ids[-4:], 0]
    assert near.forced(2) == ids[-4:-2]


def test_a_thought_far_from_its_budget_has_no_masks() -> None:
    grammars = Grammars(BUNDLED_MODEL / "tokenizer.json", 4096, [0])
    thought = Thought(open="<think>", close="</think>", end=[40, 41], begun=True)
    params = SamplingParams(thinking_token_budget=4, thought=thought)
    tokens, parents = [9, 10, 11, 12], [0, 0, 1, 1]
    assert (masks(grammars, grammars.constraint(params, [9]), tokens, parents) == -1).all()
    found = masks(grammars, grammars.constraint(params, [9, 9]), tokens, parents)
    assert (found[:2] == -1).all()
    assert [list(_bits(mask)) for mask in found[2:]] == [[40], [40]]


def masks(grammars: Grammars, held: Matcher | Constraint, tokens: list[int], parents: list[int]) -> Any:
    """Of a tree's nodes, which come after others."""
    words = torch.zeros(3 + len(tokens), grammars.words, dtype=torch.int32)
    assert grammars.fill([(3, held.after_nodes(tokens, parents))], words) == [{}]
    assert (words[:3] == -1).all()
    return words[3:].numpy()


def _bits(mask: Any) -> Any:
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]


@pytest.mark.parametrize("name", ["brackets", "a limit of tokens"])
def test_drafts_change_no_text_of_odd_grammars(name: str) -> None:
    params = [
        SamplingParams(temperature=1.2, seed=i, max_tokens=16, grammar=RECURSIVE[name]) for i in range(8)
    ]
    found = []
    for algorithm in ("NONE", "NGRAM", "EAGLE3"):
        shape = SHAPES["tree"]["shape"] if algorithm != "NONE" else ()
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        given: dict[str, Any] = dict(zip(names, shape, strict=False))
        with LLM(
            dtype="float64", cpu_threads=1, context_length=128, speculative_algorithm=algorithm, **given
        ) as llm:
            found.append([each.text for each in llm.generate(["a"] * 8, params)])
    assert found[0] == found[1] == found[2]


CLASSES = [
    *(
        r"\d",
        r"\D",
        r"\w",
        r"\W",
        r"\s",
        r"\S",
        r"[\d]",
        r"[^\d]",
        r"[a\W]",
        r"[^\W_]",
        r"[^\s]",
        r"[\S ]",
        r"[.\w-]",
    ),
    *(
        r"\\d",
        r"\\\d",
        r"[\\d]",
        r"[^\\d]",
        r"\[\d]",
        r"(?i)\d",
        r"(?i:\D)",
        r"(?x) \s # \w",
        r"(?P<x>\d)",
        r"(?:\w|\d)",
    ),
]
CHARACTERS = [
    "3",
    "a",
    "_",
    "-",
    ".",
    " ",
    "\t",
    "\x0b",
    "\\d",
    "\\3",
    "[3]",
    "\\",
    "d",
    "٣",
    "é",
    "\xa0",
    "\u2003",
    "한",
]


def test_classes_of_expressions_are_asciis() -> None:
    """As Python reads them with its flag. In JSON too, except for spaces, which are ECMAScript's."""
    grammars, tokenizer = (
        Grammars(BUNDLED_MODEL / "tokenizer.json", 4096, [0]),
        Tokenizer.load(str(BUNDLED_MODEL)),
    )

    def takes(held: str, text: str) -> bool:
        try:
            return 0 in _bits(grammars.start(held, tokenizer.encode_answer(text)).mask())
        except GrammarError:
            return False

    for pattern in CLASSES:
        compiled, written = re.compile(pattern, re.ASCII), grammar.regex(pattern)
        for text in CHARACTERS:
            assert takes(written, text) == bool(compiled.fullmatch(text)), (pattern, text)
    for pattern in (r"\d", r"\D", r"\w", r"\W", r"[\d]", r"[^\W_]"):
        written = grammar.json_schema({"type": "string", "pattern": f"^{pattern}$"})
        for text in CHARACTERS:
            expected = bool(re.fullmatch(pattern, text, re.ASCII))
            assert takes(written, json.dumps(text, ensure_ascii=False)) == expected, (pattern, text)


def test_grammars_that_nest_deeply_or_choose_among_many() -> None:
    """They take no process down, and are compiled where nobody waits."""
    rules = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(6000)) + '\na6000: "x"'
    grammars = Grammars(BUNDLED_MODEL / "tokenizer.json", 4096, [0])
    assert len(_bits(grammars.start(grammar.lark(rules), []).mask())) == 1
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "grammar"), (
        "none is waited for"
    )
    many = [f"item {i}" for i in range(8000)]
    with LLM(cpu_threads=1) as llm:
        (found,) = llm.generate(["One:"], SamplingParams(grammar=grammar.choice(many), seed=1, max_tokens=20))
    assert found.text in many


def test_compiled_grammars_are_kept_by_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used go first; the newest stays, however long it is."""
    first, second, third, long = (grammar.choice([letter * size]) for letter, size in
                                  (("a", 100), ("b", 100), ("c", 100), ("d", 1000)))  # fmt: skip
    monkeypatch.setattr("specserve.constraints.matcher.KEPT_CHARACTERS", len(first) + len(second) + 50)
    grammars = Grammars(BUNDLED_MODEL / "tokenizer.json", 4096, [0])

    def compiled(text: str) -> object:
        return grammars.compile(text).result()

    before, dropped = compiled(first), compiled(second)
    assert compiled(first) is before
    compiled(third)
    assert compiled(first) is before
    assert compiled(second) is not dropped
    newest = compiled(long)
    assert compiled(long) is newest
    assert compiled(first) is not before


def test_an_answer_that_its_grammar_can_not_follow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails alone; the one next to it, and the next with the same grammar, go on. Nothing of it is logged."""
    monkeypatch.setattr("specserve.constraints.matcher.MOST_ITEMS", 300)
    ambiguous, ends = 'start: s\ns: s s | "a" | s s s', dict.fromkeys(range(6), -100.0)
    params = SamplingParams(grammar=ambiguous, temperature=0, max_tokens=100, logit_bias=ends)
    free, few = SamplingParams(temperature=0, max_tokens=30), msgspec.structs.replace(params, max_tokens=3)
    for algorithm in ("NONE", "NGRAM"):
        with LLM(cpu_threads=1, context_length=512, speculative_algorithm=algorithm) as llm:
            with pytest.raises(ValueError, match="the grammar can't follow the answer"):
                llm.generate(["a", "b"], [params, free])
            short, other = llm.generate(["b", "a"], [few, free])
        assert re.fullmatch("a+", short.text)
        assert len(other.token_ids) > 3
    assert "aaa" not in caplog.text


def test_drafts_do_not_move_the_token_that_a_grammar_fails_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar holds up to there, and nothing follows."""
    monkeypatch.setattr("specserve.constraints.matcher.MOST_ITEMS", 1000)
    ambiguous = "start: s\ns: /[a-c]/ | s s | s s s | s s s s"
    params = [
        SamplingParams(
            grammar=ambiguous,
            temperature=temperature,
            seed=1,
            max_tokens=limit,
            logit_bias=dict.fromkeys(range(6), -100.0),
        )
        for temperature in (0.0, 1.0)
        for limit in (60, 4)  # and where it ends before
    ]
    found = []
    for algorithm, shape, overlap in (
        ("NONE", (), "off"),
        ("NGRAM", (4, 2, 9), "off"),
        ("EAGLE3", (4, 1, 5), "on"),
        ("EAGLE3", (4, 4, 16), "off"),
        ("EAGLE3", (4, 4, 16), "on"),
    ):
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        given: dict[str, Any] = dict(zip(names, shape, strict=False))
        settings = make_settings(
            dtype="float64", cpu_threads=1, context_length=128, speculative_algorithm=algorithm,
            overlap_schedule=overlap, **given,
        )  # fmt: skip
        scheduler = create_scheduler(resolve_engine(settings)[2])
        answers = []
        for each in params:
            with patch.object(Grammars, "forget", autospec=True, side_effect=Grammars.forget) as forgotten:
                answer = answer_one(scheduler, [70], each)
            answers.append((answer.tokens, answer.finish_reason, answer.refused))
            assert forgotten.called or each.max_tokens == 4, (
                "what it filled up would be full for the next answer"
            )
        found.append(answers)
        scheduler.check_idle()
        assert scheduler.stats().violations == 0
    for tokens, _, refused in found[0][::2]:
        assert refused is not None
        assert "the grammar can't follow the answer" in refused
        assert 4 < len(tokens) < 60
    assert [reason for _, reason, _ in found[0][1::2]] == ["length"] * 2
    assert found == found[:1] * 5


def test_keywords_that_ask_for_nothing() -> None:
    """Names of properties are not keywords, and notes hold any number."""
    asked = {"type": "object", "properties": {"uniqueItems": {"const": 2**53}}, "required": ["uniqueItems"]}
    nothing = {
        "propertyNames": {"type": "string"},
        "unevaluatedProperties": True,
        "not": False,
        "default": 2**60,
    }
    assert grammar.json_schema({**asked, **nothing}) == grammar.json_schema(asked)
    secret = {"type": "array", "items": {"type": "string", "format": "password"}, "uniqueItems": False}
    assert grammar.json_schema(secret) == grammar.json_schema({"type": "array", "items": {"type": "string"}})


def test_a_pydantic_model_is_its_schema() -> None:
    class City(BaseModel):
        name: str
        people: int

    assert grammar.json_schema(City) == grammar.json_schema(City.model_json_schema())
    with pytest.raises(ValueError, match="is not JSON"):
        grammar.json_schema(int)  # type: ignore[arg-type]


def cycle(kind: str, **given: Any) -> dict[str, Any]:
    return {"type": kind, "properties": {"n": {"$ref": "#"}}, "items": {"$ref": "#"}, **given}


def test_cycles_that_end_are_allowed() -> None:
    """Through what may be missing, empty, or something else."""
    for schema in (cycle("object"), cycle("array"), cycle("object", required=["m"], properties={"m": {}})):
        assert grammar.json_schema(schema)
    one = {"type": "object", "properties": {"next": {"$ref": "#/$defs/some"}}, "required": ["next"]}
    some = {"anyOf": [{"$ref": "#/$defs/one"}, {"type": "null"}]}
    assert grammar.json_schema({"$defs": {"one": one, "some": some}, "$ref": "#/$defs/one"})


@pytest.mark.parametrize("kind", ["date", "date-time"])
def test_dates_are_those_of_the_calendar(kind: str) -> None:
    grammars = Grammars(BUNDLED_MODEL / "tokenizer.json", 4096, [1])
    text = grammar.json_schema({"type": "string", "format": kind})
    tokenizer = tokenizers.Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    for day in ("2024-02-29", "2000-02-29", "1996-12-31", "0400-02-29", "2023-02-29", "1900-02-29", "2024-02-30",
                "0000-01-01", "2023-04-31", "2023-13-01"):  # fmt: skip
        try:
            datetime.date.fromisoformat(day)
            is_valid = True
        except ValueError:
            is_valid = False
        answer = json.dumps(day if kind == "date" else f"{day}T12:00:00Z")
        matcher = grammars.start(text, [])
        allowed = []
        for token in [*tokenizer.encode(answer, add_special_tokens=False).ids, 1]:
            allowed.append(bool(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[token]))
            if not allowed[-1] or token == 1:
                break
            matcher.consume([token])
        assert all(allowed) == is_valid, day


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: grammar.json_schema({"not": {"type": "integer"}}), 'Unimplemented keys: ["not"]'),
        (lambda: grammar.json_schema({"type": "intger"}), "Invalid type: intger"),
        (lambda: grammar.json_schema("{"), "is not JSON"),
        (
            lambda: grammar.json_schema('{"type": {}, "a": [{"b": 1, "b": 1}]}'),
            "the key 'b' appears twice in one object",
        ),
        (lambda: grammar.json_schema({"$ref": "#"}), "$ref: no value of '#' is finite"),
        (
            lambda: grammar.json_schema(cycle("object", required=["n"])),
            "no value of '#' is finite",
        ),
        (lambda: grammar.json_schema(cycle("array", minItems=1)), "items.$ref: no value of '#' is finite"),
        (
            lambda: grammar.json_schema(
                {
                    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}},
                    "properties": {"x": {"$ref": "#/$defs/a"}},
                }
            ),
            "$defs.a.$ref: no value of '#/$defs/b' is finite",
        ),
        (lambda: grammar.json_schema('{}, "x": {}'), "is not JSON"),
        (lambda: grammar.json_schema({"x-guidance": {"item_separator": ";"}}), "x-guidance is not supported"),
        (lambda: grammar.json_schema("false"), "false allows nothing"),
        (lambda: grammar.json_schema({"allOf": [{"enum": [{"a": 2**53 + 1}]}]}), "beyond 2^53"),
        (lambda: grammar.json_schema({"type": "integer", "minimum": -(2**60)}), "beyond 2^53"),
        (lambda: grammar.json_schema({"properties": {"pattern": {"pattern": '^[^a"]$'}}}), "excludes quotes"),
        (lambda: grammar.json_schema({"patternProperties": {r"^[^\\]$": {}}}), "excludes quotes"),
        (lambda: grammar.json_schema({"pattern": "^[a-z&&[^b]]$"}), "escape [, &, - and ~ in classes"),
        (lambda: grammar.json_schema({"pattern": r"^\[[[a]]$"}), "escape ["),
        (lambda: grammar.json_schema({"pattern": "[+--]"}), "escape ["),
        (lambda: grammar.lark('start: a\na[temperature=0.5]: "a"'), "can't set a temperature"),
        (lambda: grammar.regex("(a"), "invalid regex"),
        (lambda: grammar.lark('start: "a" | b'), 'unknown name: "b"'),
        (lambda: grammar.choice([]), "one or more texts"),
        (lambda: grammar.regex("a" * (MOST + 1)), "the limit is 131072"),
        (lambda: SamplingParams(grammar=GRAMMARS["regex"], min_tokens=2), "min_tokens: "),
        (lambda: SamplingParams(grammar=GRAMMARS["regex"], ignore_eos=True), "ignore_eos: "),
    ],
)
def test_what_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


def test_an_engine_refuses(agreeing: Checkpoints) -> None:
    """A grammar without a vocabulary, and one that is none."""
    refused = answer_one(make_scheduler(agreeing.target), [1], SamplingParams(grammar="start: /a/")).refused
    assert refused is not None
    assert "tokenizer.json" in refused
    with LLM(cpu_threads=1) as llm, pytest.raises(ValueError, match="grammar: "):
        llm.generate("a", SamplingParams(grammar="start: b"))


def test_a_masked_step_is_no_measure_of_its_shape_without_masks() -> None:
    """The controller has costs of their own for them."""
    params = SamplingParams(temperature=0, max_tokens=20, grammar=GRAMMARS["schema"])
    with (
        LLM(speculative_algorithm="NGRAM", cpu_threads=1, context_length=256) as llm,
        patch.object(CostModel, "observe", autospec=True) as observed,
    ):
        llm.generate("A person:", params)
    assert len(observed.call_args_list) > 3
    assert all(call.args[-1] is True for call in observed.call_args_list)


def test_nobody_waits_for_a_grammar() -> None:
    """While it is compiled others are answered, and who asked for it may leave."""
    scheduler = create_scheduler(resolve_engine(Settings(cpu_threads=1, context_length=256))[2])
    params = SamplingParams(temperature=0, max_tokens=4)
    constrained = msgspec.structs.replace(params, grammar=GRAMMARS["choice"])
    client, compilation = Client(scheduler), Future[object]()
    with patch.object(Grammars, "compile", return_value=compilation):
        for rid in ("waits", "leaves"):
            client.submit(rid, [5], constrained)
    client.submit("free", [5], params)
    for _ in range(20):
        client.iterate()
    assert client.answers["free"].finish_reason == "length"
    assert scheduler.has_work
    assert scheduler.stats().waiting == 2
    scheduler.abort("leaves")
    compilation.set_result(None)
    assert client.run()["waits"].tokens
    assert not client.answers["leaves"].tokens
