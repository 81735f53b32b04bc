"""What a grammar allows: masks of trees, forced text, classes of characters, dates, and what is refused."""

from __future__ import annotations

import datetime
import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from pydantic import BaseModel

from specserve import LLM, SamplingParams, grammar
from specserve.config.paths import BUNDLED_MODEL
from specserve.constraints.grammar import MOST
from specserve.constraints.matcher import Constraint, GrammarError, Grammars, Matcher
from specserve.core import Thought
from specserve.frontend.tokenizer import Tokenizer
from tests.speculation.test_grammar import GRAMMARS, RECURSIVE

pytest.importorskip("llguidance")


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


def test_added_tokens_that_the_model_has_not(tmp_path: Path) -> None:
    """Are none of the grammar's, which forces their text in others."""
    fields = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    plain = {**fields["added_tokens"][0], "special": False}
    for token, text in enumerate(("<call>", "<more>"), 4096):
        fields["added_tokens"].append({**plain, "id": token, "content": text})
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    for size in (4096, 4097):
        grammars = Grammars(tmp_path / "tokenizer.json", size, [1])
        known, unknown = (grammars.start(f'start: "{text}"', []).forced(9) for text in ("<call>", "<more>"))
        assert (known[0] == 4096) == (size > 4096)
        assert max(unknown) < 4096


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


CLASSES = [
    r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"[\d]", r"[^\d]", r"[a\W]", r"[^\W_]", r"[^\s]", r"[\S ]", r"[.\w-]",
    r"\\d", r"\\\d", r"[\\d]", r"[^\\d]", r"\[\d]", r"(?i)\d", r"(?i:\D)", r"(?x) \s # \w", r"(?P<x>\d)", r"(?:\w|\d)",
]  # fmt: skip
CHARACTERS = [*"3a_-. \t\x0b\\d٣é\xa0\u2003한", "\\d", "\\3", "[3]"]


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


def test_keywords_that_ask_for_nothing() -> None:
    """Names of properties are not keywords, and notes hold any number."""
    asked = {"type": "object", "properties": {"uniqueItems": {"const": 2**53}}, "required": ["uniqueItems"]}
    nothing = {
        "propertyNames": {"type": "string"},
        "unevaluatedProperties": True,
        "not": False,
        "default": 2**60,
        "nullable": True,
        "discriminator": {"propertyName": "uniqueItems"},
        "x-order": ["uniqueItems"],
        "strict": True,
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
