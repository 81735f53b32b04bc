"""Answers in JSON: facts under given keys or a given schema, lists of objects, and what a short text says."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..facts import ANIMALS, COUNTRIES, ELEMENTS, PLANETS
from .common import Kind, Sampler, capitalized, join, phrasings
from .countries import CAPITAL, CONTINENT, CURRENCY
from .lists import number
from .nature import GROUP, NUMBER, STATE, SYMBOL
from .values import Schema, draw, invented, object_schema, schema

P = phrasings("json_answers")

Record = dict[str, Any]


class Case(NamedTuple):
    """A question whose answer is JSON. `system` is empty or what stands in the system turn; `value` is the answer, or
    for `count` objects of the table `rows` one of the right answers."""

    system: str
    question: str
    answer: str
    schema: Schema
    value: Any
    rows: tuple[Record, ...] = ()


class Table(NamedTuple):
    """Facts as records; the first key is the subject's."""

    plural: str
    rows: tuple[Record, ...]

    @property
    def subject(self) -> str:
        """The key of the subject."""
        return next(iter(self.rows[0]))


def _table(plural: str, rows: Sequence[Record]) -> Table:
    return Table(plural, tuple(row for row in rows if "-" not in row.values()))


_PLANET_ORDER = {planet.name: i for i, planet in enumerate(PLANETS, 1)}
TABLES = (
    _table(
        "countries",
        [
            {
                "country": c.name.removeprefix("the "),
                "capital": c.capital,
                "continent": c.continent,
                "currency": c.currency,
                "languages": c.language.replace(", ", " and ").split(" and "),
            }
            for c in COUNTRIES
            if c.language != "-"
        ],
    ),
    _table(
        "chemical elements",
        [
            {
                "element": e.name,
                "symbol": e.symbol,
                "number": int(e.number),
                "state": e.state,
                "category": e.category,
            }
            for e in ELEMENTS
        ],
    ),
    _table(
        "animals",
        [{"animal": a.name, "group": a.group, "young": a.young, "plural": a.plural} for a in ANIMALS],
    ),
    _table("planets", [{"planet": p.name, "order": _PLANET_ORDER[p.name], "kind": p.kind} for p in PLANETS]),
)
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    *[("JSON", {})] * 3,
    ("compact JSON", {"separators": (",", ":")}),
    ("indented JSON", {"indent": 2}),
)
_FACTS = (CAPITAL, CONTINENT, CURRENCY, SYMBOL, NUMBER, STATE, GROUP)


class Story(NamedTuple):
    """A short text with the kinds of its fields; `heldout` are texts that training lacks."""

    kinds: dict[str, str]
    train: Sequence[str]
    heldout: Sequence[str]


STORIES = tuple(Story(**each) for each in P.stories)


def fields_of(sampler: Sampler) -> tuple[dict[str, Any], str]:
    """How the JSON is written and what the question calls it."""
    name, how = sampler.pick(FORMS)
    return how, name


def write(value: Any, how: dict[str, Any]) -> str:
    """The JSON text."""
    return json.dumps(value, ensure_ascii=False, **how)


def schema_of(value: Any) -> Schema:
    """A schema for values like this one."""
    if isinstance(value, dict):
        return object_schema({key: schema_of(part) for key, part in value.items()}, list(value))
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0])}
    return {"type": "integer" if isinstance(value, int) else "string"}


def _keys(sampler: Sampler, keys: Sequence[str]) -> str:
    return join([f'"{key}"' for key in keys] if sampler.chance(0.3) else list(keys))


def _some(sampler: Sampler, table: Table, row: Record) -> Record:
    keys = sampler.rng.sample(list(row)[1:], sampler.rng.randint(2, len(row) - 1))
    return {key: row[key] for key in ([table.subject, *keys] if sampler.chance(0.4) else keys)}


def record(sampler: Sampler) -> Case:
    """Facts of one thing under the keys of the question."""
    table = sampler.pick(TABLES)
    row = sampler.pick(table.rows)
    value = _some(sampler, table, row)
    how, form = fields_of(sampler)
    fields = {"x": row[table.subject], "keys": _keys(sampler, list(value)), "json": form}
    question = sampler.phrase(*P.record, fields, exact=True)
    return Case("", question, write(value, how), schema_of(value), value)


def listing(sampler: Sampler) -> Case:
    """A list of objects, or an object that has it under the plural."""
    table = sampler.pick(TABLES)
    chosen = sampler.neighbours(table.rows, sampler.rng.randint(2, 5))
    keys = [table.subject, *sampler.rng.sample(list(chosen[0])[1:], sampler.rng.randint(1, 2))]
    rows = tuple({key: row[key] for key in keys} for row in table.rows)
    value = [{key: row[key] for key in keys} for row in chosen]
    how, form = fields_of(sampler)
    fields = {
        "n": number(sampler, len(chosen)),
        "what": table.plural,
        "keys": _keys(sampler, keys),
        "json": form,
    }
    question = sampler.phrase(*P.listing, fields, exact=True)
    return Case("", question, write(value, how), schema_of(value), value, rows)


def by_schema(sampler: Sampler, case: Callable[[Sampler], Case]) -> Case:
    """A question with a schema in the system turn or before it: of facts, or the text of a story."""
    how, form = fields_of(sampler)
    found = case(sampler)
    fields = {"schema": json.dumps(found.schema, ensure_ascii=False), "json": form}
    demand = sampler.phrase(*P.by_schema, fields, exact=True)
    answer = write(found.value, how)
    if sampler.chance(0.6):
        return found._replace(system=demand, answer=answer)
    return found._replace(question=f"{demand}\n{found.question}", answer=answer)


def one_fact(sampler: Sampler) -> Case:
    """A question about a fact; the key is the name of its kind or "answer"."""
    kind: Kind = sampler.pick(_FACTS)
    row = sampler.pick(kind.rows)
    given = kind is NUMBER
    value = {sampler.pick((kind.key, "answer")): int(row[kind.key]) if given else row[kind.key]}
    return Case("", kind.ask(sampler, row).question, "", schema_of(value), value)


def one_record(sampler: Sampler) -> Case:
    """The name of a thing, whose facts the schema asks for."""
    table = sampler.pick(TABLES)
    row = sampler.pick(table.rows)
    value = _some(sampler, table, row)
    question = sampler.phrase(*P.one_record, {"x": row[table.subject]}, exact=True)
    if sampler.chance(0.25):
        value = {"facts": value}
    return Case("", question, "", schema_of(value), value)


def _story(sampler: Sampler) -> Story:
    """One of the table, or for training a list of made-up keys with values."""
    if sampler.heldout or sampler.chance(0.6):
        return sampler.pick(STORIES)
    keys = dict.fromkeys(invented(sampler) for _ in range(sampler.rng.randint(2, 5)))
    form = sampler.pick(
        ("{key} = {{{key}}}", "{key}: {{{key}}}", "the {key} is {{{key}}}", "{key} {{{key}}}")
    )
    text = sampler.pick((", ", "; ", " and ")).join(form.format(key=key) for key in keys) + "."
    return Story({key: sampler.pick(P.made_kinds) for key in keys}, (text,), ())


def told(sampler: Sampler, story: Story) -> tuple[str, Record, Schema]:
    """A text, what it says, and the schema of that."""
    found = {key: draw(sampler, kind) for key, kind in story.kinds.items()}
    fields = {key: value.text for key, value in found.items()}
    text = sampler.pick(story.heldout if sampler.heldout else story.train).format_map(fields)
    keys = list(story.kinds)
    if sampler.chance(0.4):
        keys = sampler.rng.sample(keys, sampler.rng.randint(2, len(keys)))
    properties = {key: schema(story.kinds[key]) for key in keys}
    return capitalized(text), {key: found[key].json for key in keys}, object_schema(properties, keys)


def extraction(sampler: Sampler) -> Case:
    """What a text says, or two texts of one kind, under the keys of the question."""
    story = _story(sampler)
    text, value, form = told(sampler, story)
    how, name = fields_of(sampler)
    fields = {"text": text, "keys": _keys(sampler, list(value)), "json": name}
    question = sampler.phrase(*P.extract, fields, exact=True)
    return Case("", question, write(value, how), form, value)


def one_story(sampler: Sampler) -> Case:
    """A text, or two of one kind for a schema of a list."""
    story = _story(sampler)
    text, value, form = told(sampler, story)
    if sampler.chance(0.75):
        return Case("", text, "", form, value)
    found = {key: draw(sampler, story.kinds[key]) for key in story.kinds}
    second = sampler.pick(story.heldout if sampler.heldout else story.train)
    text += " " + capitalized(second.format_map({key: each.text for key, each in found.items()}))
    values = [value, {key: found[key].json for key in value}]
    return Case("", text, "", {"type": "array", "items": form}, values)


def lines(sampler: Sampler) -> Case:
    """Lines "key: value" as an object."""
    story = _story(sampler)
    flat = {
        key: kind for key, kind in story.kinds.items() if kind.split()[0] not in ("list", "bool", "address")
    }
    found = {key: draw(sampler, kind).json for key, kind in flat.items()}
    how, name = fields_of(sampler)
    fields = {"text": "\n".join(f"{key}: {value}" for key, value in found.items()), "json": name}
    question = sampler.phrase(*P.lines, fields, exact=True)
    form = object_schema({key: schema(kind) for key, kind in flat.items()}, list(flat))
    return Case("", question, write(found, how), form, found)


fact_by_schema = partial(by_schema, case=one_fact)
record_by_schema = partial(by_schema, case=one_record)
story_by_schema = partial(by_schema, case=one_story)
CASES: tuple[Callable[[Sampler], Case], ...] = (
    *[record] * 2,
    *[listing] * 2,
    *[extraction] * 3,
    lines,
    fact_by_schema,
    record_by_schema,
    *[story_by_schema] * 2,
)


def ask_any(sampler: Sampler) -> Case:
    """A question of any kind whose answer is JSON."""
    return sampler.pick(CASES)(sampler)
