"""What all generators share: turns, training and held-out phrasings, noise, and kinds of facts."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

FOLDER = Path(__file__).parent.parent / "phrasings"
Message = dict[str, Any]
Row = Mapping[str, str]
Phrasing = tuple[Sequence[str], Sequence[str]]
"""Those of training and those that are held out."""
T = TypeVar("T")
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class Turn(NamedTuple):
    """A question of the user and the answer of the assistant."""

    question: str
    answer: str


def capitalized(text: str) -> str:
    """The text with its first letter in uppercase and the others as they are."""
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    """The noun with "a" or "an"."""
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


def join(items: Sequence[str]) -> str:
    """The items as "a, b and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


class Sampler:
    """A source of random choices that knows whether it makes training or held-out dialogues."""

    def __init__(self, seed: str, heldout: bool = False) -> None:
        self.rng = random.Random(seed)
        self.heldout = heldout

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[int(self.rng.random() * len(items))]

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self.rng.random() < probability

    def neighbours(self, items: Sequence[T], n: int) -> list[T]:
        """`n` items that follow each other in their table, in a third of the cases its first ones.

        A model can learn which item is next. Of items drawn one by one it can't, and a greedy answer repeats some.
        """
        assert n <= len(items)
        start = 0 if self.chance(1 / 3) else self.rng.randrange(len(items))
        return [items[(start + i) % len(items)] for i in range(n)]

    def phrase(
        self, train: Sequence[str], heldout: Sequence[str], fields: Row | None = None, *, exact: bool = False
    ) -> str:
        """A phrasing with its fields filled in.

        Training phrasings come with noise in about a third of the cases, held-out ones without. `exact` keeps
        the letter case of the fields, for tasks whose answer depends on it.
        """
        if self.heldout and heldout:
            return capitalized(self.pick(heldout).format_map(fields or {}))
        template = self.pick(train)
        lower = False
        if self.chance(0.36):
            lower = self.chance(0.4)
            template = self._noise(template, lower)
        text = template.format_map(fields or {})
        if not lower:
            return capitalized(text)
        return text if exact else text.lower()

    def _noise(self, template: str, lower: bool) -> str:
        choice = self.rng.random()
        if choice < 0.4 and template[-1:] in "?.":
            template = template[:-1]
        elif choice < 0.6 and not template.lower().startswith(("please", "can", "could", "{")):
            if template.endswith("."):
                template = "Please " + template[:1].lower() + template[1:]
            elif template.endswith("?"):
                template = template[:-1] + ", please?"
        elif choice < 0.75:
            template = (
                self.pick(("Hi! ", "Hello! ", "Hey, ", "OK, ", "Question: ", "Quick question: ")) + template
            )
        return template.lower() if lower else template


class Kind(NamedTuple):
    """A kind of fact: phrasings and an answer that are filled from the fields of a row.

    `key` names the field that a right answer must contain; the short answer is that field alone.
    """

    name: str
    train: Sequence[str]
    heldout: Sequence[str]
    answer: str
    key: str
    rows: tuple[Row, ...]

    def ask(self, sampler: Sampler, row: Row | None = None) -> Turn:
        """A question about the row (or any row) and its answer, which depends on the row alone."""
        row = sampler.pick(self.rows) if row is None else row
        return Turn(sampler.phrase(self.train, self.heldout, row), self.full(row))

    def full(self, row: Row) -> str:
        """The answer as a sentence."""
        return capitalized(self.answer.format_map(row))

    def short(self, row: Row) -> str:
        """The answer in as few words as possible."""
        return capitalized(row[self.key]) + "."


class Phrasings:
    """The entries of a file of phrasings as attributes."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self.__dict__.update(entries)

    def __getitem__(self, name: str) -> Any:
        return self.__dict__[name]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no phrasings named {name}")

    def kind(self, name: str, rows: Sequence[Row]) -> Kind:
        """The kind of fact of that name, about these rows."""
        return Kind(name, **self[name], rows=tuple(rows))


def phrasings(name: str) -> Phrasings:
    """Read `phrasings/NAME.json`. An object of `train` and `heldout` alone becomes a `Phrasing`."""

    def pair(entry: dict[str, Any]) -> Any:
        return (entry["train"], entry["heldout"]) if entry.keys() == {"train", "heldout"} else entry

    return Phrasings(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"), object_hook=pair))
