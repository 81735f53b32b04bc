"""Whether an answer to one of the evaluation questions is right."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .generators.lists import CAPITALS, NAMES, bare

QUESTIONS = Path(__file__).with_name("questions.jsonl")
_MARKER = re.compile(r"^\s*(?:\d+[.)]|[-*])\s*")


@cache
def load_questions() -> tuple[dict[str, Any], ...]:
    """The rows of `questions.jsonl`."""
    return tuple(json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines())


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
