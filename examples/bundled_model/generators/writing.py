"""Explanations, paragraphs and stories, Python answers, and small talk."""

from ..facts import COUNTRIES, PYTHON_FACTS, Country, python_tasks, rows
from .common import Sampler, Turn, article, capitalized, phrasings
from .countries import ROWS as COUNTRY_ROWS
from .nature import ANIMAL_ROWS, ELEMENT_ROWS

P = phrasings("writing")

_TOPICS = tuple({"x": topic, "text": text} for topic, text in rows("topics"))
_WHYS = tuple({"q": question, "x": clause, "text": text} for question, clause, text in rows("whys"))
TOPIC = P.kind("topic", tuple(row for row in _TOPICS if row["x"] != "supply and demand"))
WHY = P.kind("why", _WHYS)
_PYTHON = tuple(
    {
        "x": fact.name,
        "kind": "method" if "." in fact.name and fact.kind == "fn" else P.kind_names[fact.kind],
        "text": fact.text,
        "full": fact.text
        + (
            f" For example, {fact.example} returns {fact.result}."
            if fact.example not in ("-", 'print("hello")')
            else ""
        ),
    }
    for fact in PYTHON_FACTS
)
PYTHON = P.kind("python", tuple(row for row in _PYTHON if row["kind"] != "type"))
PYTHON_TYPE = P.kind("python_type", tuple(row for row in _PYTHON if row["kind"] == "type"))
_TASKS = tuple(
    {"x": task.task, "code": f"```python\n{task.code}\n```", "remark": task.remark} for task in python_tasks()
)
TASK = P.kind("task", _TASKS)
KINDS = (TOPIC, TOPIC, TOPIC, TOPIC, WHY, PYTHON, PYTHON, PYTHON, PYTHON_TYPE, TASK, TASK, TASK)


def country_text(country: Country) -> str:
    """A paragraph with all facts of a country."""
    fields = next(row for row in COUNTRY_ROWS if row["c"] == country.name)
    place = "" if country.continent == "-" else f" in {country.continent}"
    text = f"{capitalized(country.name)} is a country{place}. Its capital is {country.capital}."
    if country.language != "-":
        text += f" The {fields['spoken']} {country.language}."
    if country.currency != "-":
        text += f" The currency is the {country.currency}."
    return text


def country_paragraph(sampler: Sampler) -> Turn:
    """All facts of a country."""
    country = sampler.pick(COUNTRIES)
    return Turn(sampler.phrase(*P.country_paragraph, {"c": country.name}), country_text(country))


def compare_countries(sampler: Sampler) -> Turn:
    """The facts of two or three countries side by side."""
    n = 2 if sampler.chance(0.7) else 3
    countries = sampler.rng.sample(
        [c for c in COUNTRIES if "-" not in (c.continent, c.currency, c.language)], n
    )
    names = [c.name for c in countries]
    fields = {"c": ", ".join(names[:-1]) + " and " + names[-1]}
    lines = []
    for c in countries:
        lines += [f"{capitalized(c.name)}:", f"- Capital: {c.capital}", f"- Continent: {c.continent}"]
        lines += [f"- Language: {c.language}", f"- Currency: {c.currency}", ""]
    return Turn(sampler.phrase(*P.compare_countries, fields), "\n".join(lines[:-1]))


def thing_paragraph(sampler: Sampler) -> Turn:
    """All facts of an animal or an element."""
    if sampler.chance(0.5):
        row = sampler.pick(ANIMAL_ROWS)
        text = (
            f"{capitalized(row['a'])} is {row['a_group']}. A young {row['name']} is called {row['a_young']}."
        )
        if row["sound"] != "-":
            text += f" {capitalized(row['a'])} {row['sound']}."
        name = row["plural"]
    else:
        row = sampler.pick(ELEMENT_ROWS)
        text = f"{capitalized(row['name'])} is a chemical element with the symbol {row['symbol']} and the "
        text += f"atomic number {row['number']}. "
        text += f"It is {row['a_category']} and a {row['state']} at room temperature."
        name = "the element " + row["name"]
    return Turn(sampler.phrase(*P.thing_paragraph, {"x": name}), text)


def two_topics(sampler: Sampler) -> Turn:
    """Two explanations in one answer."""
    first, second = sampler.rng.sample(TOPIC.rows, 2)
    question = sampler.phrase(*P.two_topics, {"a": first["x"], "b": second["x"]})
    return Turn(question, f"{first['text']}\n\n{second['text']}")


def tale(sampler: Sampler) -> Turn:
    """A short story about an animal and its friend."""
    hero, friend = sampler.rng.sample(P.heroes, 2)
    trouble, reaction, way_out = sampler.pick(P.troubles)
    text = (
        f"Once upon a time, there was {article(sampler.pick(P.traits))} {hero} "
        f"who lived {sampler.pick(P.where)}. "
        f"One day the {hero} wanted to {sampler.pick(P.goals)}. "
        f"On the way the {hero} met {article(friend)}, and they decided to go together. "
        f"After a while {trouble}. The {hero} and the {friend} {reaction} and {way_out}. "
        f"In the evening they came home happy and tired. "
        f"Since that day they have known that {sampler.pick(P.morals)}."
    )
    return Turn(sampler.phrase(*P.tale, {"a": article(hero)}), text)


def letter(sampler: Sampler) -> Turn:
    """A short letter."""
    about, body = sampler.pick(rows("letters"))
    name = sampler.pick(P.letter_names)
    question = sampler.phrase(*P.letter, {"n": name, "x": about}, exact=True)
    return Turn(question, f"Dear {name},\n\n{body}\n\nKind regards")


_TALK = tuple((tuple(t.split("/")), tuple(h.split("/")), answer) for t, h, answer in rows("smalltalk"))


def small_talk(sampler: Sampler) -> Turn:
    """Greetings and questions about the assistant itself."""
    train, held_out, answer = sampler.pick(_TALK)
    return Turn(sampler.phrase(train, held_out), answer)


def explain(sampler: Sampler) -> Turn:
    """An explanation or a Python answer."""
    return sampler.pick(KINDS).ask(sampler)


def long_text(sampler: Sampler) -> Turn:
    """A longer answer."""
    forms = (
        country_paragraph,
        country_paragraph,
        compare_countries,
        thing_paragraph,
        two_topics,
        tale,
        tale,
        letter,
    )
    return sampler.pick(forms)(sampler)
