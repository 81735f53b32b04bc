"""Whether an answer to one of the evaluation questions is right."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .generators.lists import CAPITALS, NAMES, bare

QUESTIONS = Path(__file__).with_name("questions.jsonl")
STRUCTURED = Path(__file__).with_name("structured_questions.jsonl")
_MARKER = re.compile(r"^\s*(?:\d+[.)]|[-*])\s*")


@cache
def load_questions(path: Path = QUESTIONS) -> tuple[dict[str, Any], ...]:
    """The rows of `questions.jsonl`, or of another such file."""
    return tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def list_items(answer: str) -> list[str]:
    """The items of a numbered, bulleted or plain list, or of one sentence, without their markers."""
    lines = [line for line in answer.strip().splitlines() if line.strip()]
    marked = [_MARKER.sub("", line).strip() for line in lines if _MARKER.match(line)]
    if marked or len(lines) != 1:
        return marked or [line.strip() for line in lines]
    return [item.strip() for item in re.split(r",| and ", lines[0].rstrip(" ."))]


def is_capital_list(answer: str, count: int) -> bool:
    """True if the answer has exactly `count` different countries, each with its own capital."""
    pairs = [re.split(r"\s*[:–—]\s*|\s+-\s+", item, maxsplit=1) for item in list_items(answer)]
    if len(pairs) != count or any(len(pair) != 2 for pair in pairs):
        return False
    capitals = {name.lower(): capital.lower() for name, capital in CAPITALS.items()}
    found = {bare(country.lower()): capital.lower().rstrip(" ") for country, capital in pairs}
    return len(found) == count and all(
        capitals.get(name) in (capital, capital.rstrip(".")) for name, capital in found.items()
    )


def is_name_list(answer: str, count: int, category: str) -> bool:
    """True if the answer has exactly `count` different members of the category."""
    known = {name.lower() for name in NAMES[category]}
    items = {bare(item.lower().rstrip(".")) for item in list_items(answer)}
    return len(items) == count == len(list_items(answer)) and items <= known


def check_answer(row: Mapping[str, Any], answer: str) -> bool:
    """True if the answer is right: some `accept` pattern is found and no `reject` pattern is.

    Patterns ignore case and let a dot match a newline. Lists are checked against the tables of facts instead.
    """
    if row["kind"] == "capital_list":
        return is_capital_list(answer, row["count"])
    if row["kind"] == "name_list":
        return is_name_list(answer, row["count"], row["category"])
    flags = re.IGNORECASE | re.DOTALL
    if any(re.search(pattern, answer, flags) for pattern in row.get("reject", ())):
        return False
    return any(re.search(pattern, answer, flags) for pattern in row["accept"])


def canonical(value: object) -> object:
    """The value such that equal JSON is equal: 20 is 20.0, but true is not 1."""
    if isinstance(value, dict):
        return {key: canonical(part) for key, part in value.items()}
    if isinstance(value, list):
        return [canonical(part) for part in value]
    return (isinstance(value, bool), value)


def parsed(text: str) -> object:
    """The canonical JSON value of a text, None if it is none."""
    try:
        return canonical(json.loads(text))
    except ValueError:
        return None


def check_calls(row: Mapping[str, Any], calls: Sequence[tuple[str, str]]) -> bool:
    """True if the calls, names with the text of their arguments, are those of the row, in its order."""
    wanted = [(call["name"], canonical(call["arguments"])) for call in row["calls"]]
    return [(name, parsed(arguments)) for name, arguments in calls] == wanted


def check_json(row: Mapping[str, Any], answer: str) -> bool:
    """True if the whole answer is the row's JSON value, or as many different ones of its rows as it wants."""
    found = parsed(answer)
    if "value" in row:
        return found == canonical(row["value"])
    known = [canonical(item) for item in row["rows"]]
    return (
        isinstance(found, list)
        and len(found) == row["count"]
        and all(item in known and found.count(item) == 1 for item in found)
    )
