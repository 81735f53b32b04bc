"""Lists, numbered or bulleted or in one sentence, and small tables. The phrasing alone decides the format."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..facts import (
    ANIMALS,
    CATEGORIES,
    COLOURS,
    COUNTRIES,
    DAYS,
    ELEMENTS,
    MONTHS,
    PLANETS,
    PYTHON_FACTS,
    rows,
)
from .common import NUMBER_WORDS, Phrasing, Sampler, Turn, capitalized, join, phrasings

P = phrasings("lists")

Item = tuple[str, str]


class Pairs(NamedTuple):
    """A list of pairs: `what` completes "List 3 ...", `ordered` means that the order is fixed."""

    what: str
    items: tuple[Item, ...]
    ordered: bool = False


def bare(name: str) -> str:
    """A country's name as it stands in a list."""
    return name.removeprefix("the ")


CAPITALS = {bare(country.name): country.capital for country in COUNTRIES}
PAIRS = (
    *[Pairs("countries and their capitals", tuple(CAPITALS.items()))] * 4,
    *(
        Pairs(
            f"countries in {continent} and their capitals",
            tuple((bare(c.name), c.capital) for c in COUNTRIES if c.continent == continent),
        )
        for continent in P.continents
    ),
    Pairs(
        "countries and their currencies",
        tuple((bare(c.name), c.currency) for c in COUNTRIES if c.currency != "-"),
    ),
    Pairs(
        "countries and their continents",
        tuple((bare(c.name), c.continent) for c in COUNTRIES if c.continent != "-"),
    ),
    Pairs("elements and their symbols", tuple((e.name, e.symbol) for e in ELEMENTS)),
    Pairs("elements and their atomic numbers", tuple((e.name, e.number) for e in ELEMENTS)),
    Pairs("animals and their young", tuple((a.name, a.young) for a in ANIMALS)),
    Pairs("animals and the sounds they make", tuple((a.name, a.sound) for a in ANIMALS if a.sound != "-")),
    Pairs("books and their authors", tuple((w, p) for verb, w, p in rows("works") if verb == "wrote")),
    Pairs("pairs of opposites", tuple((a, b) for a, b in rows("opposites"))),
    Pairs("verbs and their past tenses", tuple((a, b) for a, b in rows("pasts"))),
    Pairs(
        "Python functions and what they do",
        tuple(
            (f.name, f.text.split(f" {f.name} function ", 1)[-1])
            for f in PYTHON_FACTS
            if f.kind == "fn" and "." not in f.name
        ),
    ),
    Pairs("planets and what kind of planet they are", tuple((p.name, p.kind) for p in PLANETS)),
)
NAMES: dict[str, tuple[str, ...]] = {
    **CATEGORIES,
    "countries": tuple(bare(c.name) for c in COUNTRIES),
    **{f"countries in {k}": tuple(bare(c.name) for c in COUNTRIES if c.continent == k) for k in P.continents},
    "capitals": tuple(c.capital for c in COUNTRIES),
    "capital cities in Europe": tuple(c.capital for c in COUNTRIES if c.continent == "Europe"),
    "animals": tuple(a.name for a in ANIMALS),
    **{
        f"{k}s": tuple(a.name for a in ANIMALS if a.group == k)
        for k in ("mammal", "bird", "insect", "reptile")
    },
    "colours": COLOURS,
    "chemical elements": tuple(e.name for e in ELEMENTS),
    "noble gases": tuple(e.name for e in ELEMENTS if e.category == "noble gas"),
    "planets": tuple(p.name for p in PLANETS),
    "Python keywords": tuple(f.name for f in PYTHON_FACTS if f.kind == "kw"),
    "Python modules": tuple(f.name for f in PYTHON_FACTS if f.kind == "mod"),
}
ORDERED = {
    "planets from the Sun": tuple(p.name for p in PLANETS),
    "months of the year": MONTHS,
    "days of the week": DAYS,
    "elements of the periodic table": tuple(e.name for e in ELEMENTS[:8]),
    "letters of the alphabet": tuple("ABCDEFGHIJ"),
}


def number(sampler: Sampler, n: int) -> str:
    """A small number in digits or, sometimes, as a word."""
    return NUMBER_WORDS[n] if n < len(NUMBER_WORDS) and sampler.chance(0.3) else str(n)


def numbered(items: Sequence[str]) -> str:
    """The items as lines "1. ..."."""
    return "\n".join(f"{i}. {capitalized(item)}" for i, item in enumerate(items, 1))


def bulleted(items: Sequence[str]) -> str:
    """The items as lines "- ..."."""
    return "\n".join(f"- {capitalized(item)}" for item in items)


def sentence(items: Sequence[str]) -> str:
    """The items as one sentence."""
    return capitalized(join(items)) + "."


FORMS: tuple[tuple[Phrasing, Callable[[Sequence[str]], str]], ...] = (
    *[(P.numbered, numbered)] * 2,
    (P.bulleted, bulleted),
    (P.sentence, sentence),
)


def pairs(sampler: Sampler) -> Turn:
    """A numbered or bulleted list of pairs "France: Paris"."""
    kind = sampler.pick(PAIRS)
    n = sampler.rng.randint(2, min(8, len(kind.items)))
    phrasing, form = sampler.pick(FORMS[:3])
    items = [f"{left}: {right}" for left, right in sampler.neighbours(kind.items, n)]
    question = sampler.phrase(*phrasing, {"n": number(sampler, n), "what": kind.what})
    return Turn(question, form(items))


def names(sampler: Sampler, what: str | None = None) -> Turn:
    """A list of things of one category."""
    what = sampler.pick(tuple(NAMES)) if what is None else what
    n = sampler.rng.randint(2, min(8, len(NAMES[what])))
    phrasing, form = sampler.pick(FORMS)
    question = sampler.phrase(*phrasing, {"n": number(sampler, n), "what": what})
    return Turn(question, form(sampler.neighbours(NAMES[what], n)))


def ordered(sampler: Sampler) -> Turn:
    """The first things of a sequence, or all of it."""
    what = sampler.pick(tuple(ORDERED))
    items = ORDERED[what]
    n = sampler.rng.randint(2, len(items) - 1)
    phrasing, form = sampler.pick(FORMS)
    question = sampler.phrase(*phrasing, {"n": f"the first {number(sampler, n)}", "what": what})
    return Turn(question, form(items[:n]))


def whole(sampler: Sampler) -> Turn:
    """A whole sequence in order."""
    name, items = sampler.pick(
        (
            ("planets of the Solar System", ORDERED["planets from the Sun"]),
            ("months of the year", MONTHS),
            ("days of the week", DAYS),
            ("seasons of the year", ("spring", "summer", "autumn", "winter")),
            ("continents", CATEGORIES["continents"]),
            ("oceans", CATEGORIES["oceans"]),
        )
    )
    if sampler.chance(0.5):
        return Turn(sampler.phrase(*P.whole, {"what": name}), numbered(items))
    return Turn(sampler.phrase(*P.all_of, {"what": name}), sentence(items))


def table(sampler: Sampler) -> Turn:
    """A Markdown table of countries or elements."""
    n = sampler.rng.randint(2, 6)
    if sampler.chance(0.6):
        what, head = "countries with capital and currency", "| Country | Capital | Currency |"
        rows_ = [(bare(c.name), c.capital, c.currency) for c in COUNTRIES if c.currency != "-"]
    else:
        what, head = "elements with symbol and atomic number", "| Element | Symbol | Number |"
        rows_ = [(capitalized(e.name), e.symbol, e.number) for e in ELEMENTS]
    question = sampler.phrase(*P.table, {"n": number(sampler, n), "what": what})
    lines = [
        head,
        "| --- | --- | --- |",
        *(f"| {a} | {b} | {c} |" for a, b, c in sampler.neighbours(rows_, n)),
    ]
    return Turn(question, "\n".join(lines))


def ask_any(sampler: Sampler) -> Turn:
    """A list of any kind."""
    return sampler.pick((pairs, pairs, pairs, names, names, names, ordered, whole, table))(sampler)
