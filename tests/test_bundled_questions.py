"""The bundled model's evaluation questions: the checker, and that training never sees the questions."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.bundled_model import make_questions
from examples.bundled_model.check_answer import check_answer, load_questions
from examples.bundled_model.dialogues import Dialogue, dialogues
from examples.bundled_model.generators import arithmetic, countries, culture, nature, rewriting, writing
from examples.bundled_model.generators.common import Kind

SAMPLE = 10_000
PROMPTS = Path(make_questions.__file__).with_name("prompts.jsonl")
EQUATION = re.compile(r"(?<![\d+*/-] )(?<!\d)(\d+) ([-+*/]) (\d+) = (-?\d+)")
ALL_KINDS: tuple[Kind, ...] = (
    *(*countries.KINDS, *nature.KINDS, *culture.KINDS, *writing.KINDS, rewriting.TO, rewriting.FROM),
)


@pytest.fixture(scope="module")
def training() -> list[Dialogue]:
    return list(dialogues(SAMPLE))


def normalized(text: str) -> str:
    """The words of the text without case, punctuation and "please"."""
    words = re.findall(r"\w+|[-+*/]", text.lower())
    return " ".join(word for word in words if word != "please")


def contents(items: list[Dialogue], role: str) -> Iterator[str]:
    for item in items:
        yield from (message["content"] for message in item["messages"] if message["role"] == role)


def row(kind: str, **more: Any) -> dict[str, Any]:
    return {"question": "", "kind": kind, "accept": [], **more}


def test_the_file_is_what_the_code_makes() -> None:
    assert [dict(question) for question in load_questions()] == make_questions.questions()
    assert len({question["question"] for question in load_questions()}) == 100


def test_no_question_is_in_training(training: list[Dialogue]) -> None:
    asked = {normalized(text) for text in contents(training, "user")}
    assert [q["question"] for q in load_questions() if normalized(q["question"]) in asked] == []


def test_no_held_out_operands_are_in_training(training: list[Dialogue]) -> None:
    found = [match for text in contents(training, "assistant") for match in EQUATION.findall(text)]
    assert len(found) > SAMPLE // 2
    for a, sign, b, result in found:
        assert not arithmetic.is_held_out(int(a), sign, int(b))
        assert arithmetic.Sum(int(a), sign, int(b)).result == int(result)


def test_training_and_held_out_phrasings_differ() -> None:
    for kind in ALL_KINDS:
        train, held_out = ({normalized(text) for text in part} for part in (kind.train, kind.heldout))
        assert len(train) >= 8, kind.name
        assert held_out, kind.name
        assert not train & held_out, kind.name


def test_right_facts_pass() -> None:
    by_name = {kind.name: kind for kind in ALL_KINDS}
    right = {name: {kind.full(row) for row in kind.rows} for name, kind in by_name.items()}
    for question in load_questions():
        if question["kind"] in right:
            passed = [answer for answer in right[question["kind"]] if check_answer(question, answer)]
            assert passed, question
            assert len(passed) < max(2, len(right[question["kind"]])), question


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("17 + 25 = 42.", True),
        ("42", True),
        ("The answer is 42!", True),
        ("17 + 25 = 43.", False),
        ("142", False),
    ],
)
def test_arithmetic(answer: str, expected: bool) -> None:
    assert check_answer(row("arithmetic", accept=[make_questions.number(42)]), answer) is expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1. France: Paris\n2. Japan: Tokyo", True),
        ("Here you are:\n- the United States: Washington, D.C.\n- Chad: N'Djamena", True),
        ("1. France - Paris\n2. Japan - Tokyo", True),
        ("1. France: Paris\n2. Japan: Kyoto", False),
        ("1. France: Paris\n2. France: Paris", False),
        ("1. France: Paris", False),
        ("1. France: Paris\n2. Japan: Tokyo\n3. Chad: N'Djamena", False),
        ("1. France\n2. Japan", False),
        ("", False),
    ],
)
def test_capital_list(answer: str, expected: bool) -> None:
    assert check_answer(row("capital_list", count=2), answer) is expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1. Dog\n2. Cat\n3. Owl", True),
        ("Dog, cat and owl.", True),
        ("1. Dog\n2. Dog\n3. Owl", False),
        ("1. Dog\n2. Table\n3. Owl", False),
        ("1. Dog\n2. Cat", False),
    ],
)
def test_name_list(answer: str, expected: bool) -> None:
    assert check_answer(row("name_list", count=3, category="animals"), answer) is expected


def test_case_matters_where_it_is_the_task() -> None:
    question = next(q for q in load_questions() if q["kind"] == "rewrite_upper")
    text = question["question"].split(": ")[1]
    assert check_answer(question, text.upper())
    assert not check_answer(question, text)


def test_reject() -> None:
    question = next(q for q in load_questions() if q["kind"] == "group")
    assert check_answer(question, "It is a mammal.")
    assert not check_answer(question, "It is a mammal or a bird.")


def test_prompts() -> None:
    prompts = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert sum("messages" in prompt for prompt in prompts) == 50
    assert all(p["messages"][-1]["role"] == "user" for p in prompts if "messages" in p)
    code = [prompt["prompt"] for prompt in prompts if "prompt" in prompt]
    assert len(set(code)) == 50
    assert all(text.endswith("\n") and 200 < len(text) < 800 for text in code)
