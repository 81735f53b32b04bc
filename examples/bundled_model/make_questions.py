"""Makes `questions.jsonl`, 100 questions whose phrasing or operands, though not facts, are held out, and
`structured_questions.jsonl`, 40 for tools and 20 for answers in JSON, whose values and every second tool are, too.

python -m examples.bundled_model.make_questions
"""

import argparse
import re
from collections.abc import Callable, Iterator
from typing import Any

from .check_answer import QUESTIONS, STRUCTURED
from .facts import tools as known_tools
from .generators import arithmetic, countries, culture, json_answers, lists, nature, rewriting, tools, writing
from .generators.common import Kind, Row, Sampler, Turn
from .make_data import write_lines

Question = dict[str, Any]
FACTS: tuple[tuple[Kind, int], ...] = (
    (countries.CAPITAL, 8),
    (countries.CAPITAL_OF, 4),
    (countries.CONTINENT, 3),
    (countries.CURRENCY, 3),
    (countries.LANGUAGE, 3),
    (nature.SOUND, 2),
    (nature.YOUNG, 2),
    (nature.GROUP, 2),
    (nature.SYMBOL, 3),
    (nature.SYMBOL_OF, 2),
    (nature.NUMBER, 2),
    (nature.PLANET, 1),
    (nature.COLOUR, 1),
    (culture.WORK, 3),
    (culture.OPPOSITE, 2),
    (culture.PLURAL, 1),
    (culture.PAST, 1),
    (culture.DAY_AFTER, 1),
    (culture.MONTH_DAYS, 1),
)
EXPLANATIONS: tuple[tuple[Kind, str, str], ...] = (
    (writing.TOPIC, "photosynthesis", r"sunlight.*(sugar|oxygen)|light.*sugar"),
    (writing.TOPIC, "a volcano", r"lava|magma"),
    (writing.TOPIC, "gravity", r"force.*(pull|attract|mass)"),
    (writing.TOPIC, "an algorithm", r"steps|instructions"),
    (writing.WHY, "why the sky is blue", r"scatter"),
    (writing.PYTHON, "len()", r"(number|count) of (items|elements)|length"),
    (writing.PYTHON, "str.upper()", r"upper ?case"),
    (writing.TASK, "adds two numbers", r"def \w+\(.*return a \+ b"),
    (writing.TASK, "reverses a string", r"def \w+\(.*\[::-1\]|def \w+\(.*reversed\("),
    (writing.TASK, "checks whether a number is even", r"def \w+\(.*% 2 == 0"),
)
CAPITAL_LISTS = (3, 5)
NAME_LISTS = (("animals", 4), ("countries in Europe", 5))
PLANETS = r"Mercury.*Venus.*Earth.*Mars.*Jupiter.*Saturn.*Uranus.*Neptune"


def word(text: str) -> str:
    """A pattern for the text as whole words; large numbers may have a comma."""
    pattern = re.escape(text)
    if text.isdigit() and len(text) > 3:
        pattern = f"{text[:-3]},?{text[-3:]}"
    return rf"(?<!\w){pattern}(?!\w)"


def number(value: int) -> str:
    """A pattern for an answer whose last number is the value."""
    return rf"(?<![\d.,-]){value}\D*$"


def is_fair(kind: Kind, row: Row) -> bool:
    """Leaves out rows whose answer may be given in several ways or stands in the question."""
    answer = row[kind.key].lower()
    if kind is countries.LANGUAGE and " and " in answer:
        return False
    if kind in (countries.CAPITAL, countries.CAPITAL_OF) and " city" in row["capital"].lower():
        return False
    if kind in (countries.CAPITAL, countries.CAPITAL_OF):
        return row["capital"] not in row["c"] and row["c"] not in row["capital"]
    return answer != "was or were"


def facts(sampler: Sampler) -> Iterator[Question]:
    """Facts in held-out phrasings, every subject once."""
    groups = {row["group"] for row in nature.GROUP.rows}
    for kind, count in FACTS:
        for row in sampler.rng.sample([row for row in kind.rows if is_fair(kind, row)], count):
            answer = row[kind.key]
            question: Question = {"question": kind.ask(sampler, row).question, "kind": kind.name}
            question["accept"] = [word(lists.bare(answer))]
            if kind is nature.SYMBOL:
                question["accept"] = [f"(?-i:{word(answer)})"]
            if kind is nature.YOUNG:
                question["accept"] += [word(answer + "s"), word(answer[:-1] + "ies")]
            if kind is nature.GROUP:
                question["reject"] = [word(group) for group in sorted(groups - {answer})]
            yield question


def arithmetics(sampler: Sampler) -> Iterator[Question]:
    """Sums: additions and subtractions of held-out operands, products and quotients in held-out phrasings."""
    phrasings = ("What is {a} {sign} {b}?", "Calculate {a} {sign} {b}.", "What is {a} {word} {b}?")
    for sign, count in (("+", 10), ("-", 9), ("*", 4), ("/", 2)):
        for index in range(count):
            item = arithmetic.draw(sampler, sign)
            while item.result < 1 or item.b < 2:
                item = arithmetic.draw(sampler, sign)
            if sign == "*":
                item = arithmetic.Sum(sampler.rng.randint(3, 9), sign, sampler.rng.randint(3, 9))
            held_out = arithmetic.is_held_out(item.a, sign, item.b)
            phrasing = phrasings[index % 3] if held_out else sampler.pick(arithmetic.P.any[1])
            text = phrasing.format(a=item.a, b=item.b, sign=sign, word=arithmetic.P.signs[sign])
            yield {"question": text, "kind": "arithmetic", "accept": [number(item.result)]}


def translations(sampler: Sampler) -> Iterator[Question]:
    """Eight translations from English and two into it."""
    for kind, count in ((rewriting.TO, 8), (rewriting.FROM, 2)):
        for row in sampler.rng.sample(
            [row for row in kind.rows if row["e"].lower() != row["f"].lower()], count
        ):
            text = row[kind.key].strip("¿?¡! ")
            yield {"question": kind.ask(sampler, row).question, "kind": "translation", "accept": [word(text)]}


def exact(turn: Turn, kind: str) -> Question:
    """A question whose answer must appear literally, letter case included."""
    return {"question": turn.question, "kind": kind, "accept": [f"(?-i:{re.escape(turn.answer)})"]}


def lists_and_rewrites(sampler: Sampler) -> Iterator[Question]:
    """Lists that are checked against the tables, and rewriting tasks."""
    for count in CAPITAL_LISTS:
        fields = {"n": str(count), "what": "countries and their capitals"}
        text = sampler.phrase((), lists.P.numbered[1], fields)
        yield {"question": text, "kind": "capital_list", "count": count, "accept": []}
    for category, count in NAME_LISTS:
        text = sampler.phrase((), lists.P.numbered[1], {"n": str(count), "what": category})
        yield {"question": text, "kind": "name_list", "count": count, "category": category, "accept": []}
    text = "Can you name the planets of the Solar System?"
    yield {"question": text, "kind": "ordered_list", "accept": [PLANETS]}
    for task in (
        rewriting.upper,
        rewriting.backwards,
        rewriting.alphabetical,
        rewriting.plural,
        rewriting.past,
    ):
        yield exact(task(sampler), f"rewrite_{task.__name__}")


def explanations(sampler: Sampler) -> Iterator[Question]:
    """Explanations and Python tasks whose answers must have the decisive words."""
    for kind, subject, pattern in EXPLANATIONS:
        row = next(row for row in kind.rows if row["x"] == subject)
        yield {"question": kind.ask(sampler, row).question, "kind": kind.name, "accept": [pattern]}


def questions() -> list[Question]:
    """The 100 questions."""
    sampler = Sampler("questions", heldout=True)
    parts = (facts, arithmetics, translations, lists_and_rewrites, explanations)
    return [question for part in parts for question in part(sampler)]


def tool_questions(sampler: Sampler) -> Iterator[Question]:
    """One question for each held-out tool and 12 for others, 6 for two calls, 4 for a tool that is not there, and 4 for
    none."""
    needed = [*known_tools(True), *sampler.rng.sample(known_tools(False), 12)]
    for tool in needed:
        offers = tools.choose(sampler, (tool,))
        asked = tools.request(sampler, next(each for each in offers if each.tool is tool))
        yield tool_question("call", offers, tools.ask(sampler, asked), [asked.call])
    for _ in range(6):
        both = [tools.some_tool(sampler) for _ in range(2)]
        offers = tools.choose(sampler, both[: 1 + (both[0] != both[1])])
        first, second = (
            tools.request(sampler, next(each for each in offers if each.tool is tool), order=True)
            for tool in both
        )
        yield tool_question(
            "calls", offers, tools.ask_both(sampler, first, second), [first.call, second.call]
        )
    for _ in range(4):
        offers = tools.choose(sampler)
        yield tool_question("no tool", offers, tools.missing(sampler, offers).question, [])
    for kind in (countries.CAPITAL, nature.SYMBOL, culture.OPPOSITE, writing.TOPIC):
        yield tool_question("no tool", tools.choose(sampler), kind.ask(sampler).question, [])


def tool_question(kind: str, offers: list[tools.Offer], text: str, calls: list[tools.Call]) -> Question:
    """A row of a tool question."""
    messages = [{"role": "user", "content": text}]
    return {"kind": kind, "messages": messages, "tools": [each.spec for each in offers], "calls": calls}


JSON_CASES: tuple[tuple[Callable[[Sampler], json_answers.Case], int], ...] = (
    (json_answers.record, 4),
    (json_answers.listing, 3),
    (json_answers.extraction, 4),
    (json_answers.lines, 2),
    (json_answers.fact_by_schema, 2),
    (json_answers.record_by_schema, 2),
    (json_answers.story_by_schema, 3),
)


def json_questions(sampler: Sampler) -> Iterator[Question]:
    """Questions whose answer is one JSON value, or a list of objects of a table."""
    for make, count in JSON_CASES:
        for _ in range(count):
            case = make(sampler)
            messages = [{"role": "system", "content": case.system}] if case.system else []
            messages.append({"role": "user", "content": case.question})
            expected = {"rows": case.rows, "count": len(case.value)} if case.rows else {"value": case.value}
            kind = "json list" if case.rows else "json"
            yield {"kind": kind, "messages": messages, "schema": case.schema, **expected}


def structured_questions() -> list[Question]:
    """The 60 questions."""
    sampler = Sampler("structured questions", heldout=True)
    return [*tool_questions(sampler), *json_questions(sampler)]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    write_lines(QUESTIONS, questions())
    write_lines(STRUCTURED, structured_questions())


if __name__ == "__main__":
    main()
