"""The tables of facts: tab-separated files, one row a fact, `-` where the answer is unknown or disputed."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent


class Country(NamedTuple):
    """`name` has its article ("the Netherlands"); `language` may be a list ("Greek and Turkish")."""

    name: str
    capital: str
    continent: str
    currency: str
    language: str


class Element(NamedTuple):
    """A chemical element; `state` is the state at room temperature."""

    name: str
    symbol: str
    number: str
    state: str
    category: str


class Animal(NamedTuple):
    """An animal; `sound` is a verb in the third person ("barks"), `young` a noun."""

    name: str
    plural: str
    group: str
    sound: str
    young: str


class Planet(NamedTuple):
    """A planet of the Solar System; `note` completes the sentence "It is ..."."""

    name: str
    order: str
    kind: str
    note: str


class PythonFact(NamedTuple):
    """`kind` is fn, kw, mod or type; `example` and `result` are an expression and what it evaluates to."""

    kind: str
    name: str
    text: str
    example: str
    result: str


class Parameter(NamedTuple):
    """A parameter of a tool: its names, of which questions have the first in braces, the kind of its values (see
    `generators/values.py`), the clause that adds it to a question if it is optional, and what it means."""

    names: tuple[str, ...]
    kind: str
    clause: str
    about: str
    optional: bool


class Tool(NamedTuple):
    """An invented function. `train` and `heldout` are phrasings: a question, or what completes "Please ...".
    `results` are the kinds of its results, `summary` is a sentence about arguments and results."""

    names: tuple[str, ...]
    about: str
    parameters: tuple[Parameter, ...]
    train: tuple[str, ...]
    heldout: tuple[str, ...]
    results: dict[str, str]
    summary: str


class Task(NamedTuple):
    """A small programming task: "Write a function that {task}."."""

    task: str
    code: str
    remark: str


@cache
def rows(name: str) -> tuple[tuple[str, ...], ...]:
    """The rows of a table, all of one width."""
    lines = (FOLDER / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
    table = tuple(tuple(line.split("\t")) for line in lines if line)
    if len({len(row) for row in table}) != 1:
        raise ValueError(f"{name}.tsv: rows of different width")
    return table


def pairs(name: str) -> dict[str, str]:
    """A table of two columns as a dictionary."""
    return {row[0]: row[1] for row in rows(name)}


@cache
def python_tasks() -> tuple[Task, ...]:
    """The tasks of `python_tasks.md`: a `# ` line with the task, the code, and a `= ` line with a remark."""
    tasks = []
    for part in ("\n" + (FOLDER / "python_tasks.md").read_text(encoding="utf-8")).split("\n# ")[1:]:
        task, body = part.split("\n", 1)
        code, remark = body.rsplit("\n= ", 1)
        tasks.append(Task(task.strip(), code, remark.strip()))
    return tuple(tasks)


def _tool(block: str) -> Tool:
    head, *lines = block.strip().splitlines()
    names, about = head.split(" | ")
    marked = {mark: tuple(line[2:] for line in lines if line[:2] == f"{mark} ") for mark in "+-><"}
    return Tool(
        tuple(names.split(", ")),
        about,
        tuple(_parameter(line) for line in lines if line[0] not in "+-><"),
        marked["+"],
        marked["-"],
        dict(part.split(": ", 1) for part in marked[">"][0].split("; ")),
        marked["<"][0],
    )


def _parameter(line: str) -> Parameter:
    found = re.fullmatch(r"(\S+): ([^\[|]+?)(?: \[(.+?)\])?(?: \| (.+))?", line)
    if found is None:
        raise ValueError(f"tools.md: no parameter: {line}")
    names, kind, clause, about = found.groups(default="")
    return Parameter(tuple(names.replace("?", "").split("/")), kind, clause, about, "?" in names)


@cache
def tools(heldout: bool) -> tuple[Tool, ...]:
    """The tools of `tools.md`: blocks after `# ` train, those after `## ` are held out. In a block the names and what
    the tool does, a line a parameter, and marked lines: `+` training phrasings, `-` held-out ones, `>` results, `<` the
    summary."""
    blocks = ("\n" + (FOLDER / "tools.md").read_text(encoding="utf-8")).split("\n#")[1:]
    return tuple(_tool(block.lstrip("#")) for block in blocks if block.startswith("#") == heldout)


CATEGORIES = {name: tuple(items.split(",")) for name, items in rows("categories")}
COUNTRIES = tuple(Country(*row) for row in rows("countries"))
ELEMENTS = tuple(Element(*row) for row in rows("elements"))
ANIMALS = tuple(Animal(*row) for row in rows("animals"))
PLANETS = tuple(Planet(*row) for row in rows("planets"))
PYTHON_FACTS = tuple(PythonFact(*row) for row in rows("python"))
COLOURS = (
    "red",
    "orange",
    "yellow",
    "green",
    "blue",
    "purple",
    "pink",
    "brown",
    "black",
    "white",
    "grey",
    "turquoise",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
SEASONS = ("spring", "summer", "autumn", "winter")
LANGUAGES = ("Spanish", "French", "German", "Italian")
