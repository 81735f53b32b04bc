"""Sums with whole numbers. Operand pairs chosen by a hash are held out: training never shows their result.

Pairs of small numbers are never held out, because longer sums are made of them.
"""

import zlib
from typing import NamedTuple

from .common import Sampler, Turn, capitalized, phrasings

P = phrasings("arithmetic")


class Sum(NamedTuple):
    """One operation; its text with the result is `a + b = c`."""

    a: int
    sign: str
    b: int

    @property
    def result(self) -> int:
        """The exact result; divisions are only made with exact quotients."""
        results = {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}
        return self.a // self.b if self.sign == "/" else results[self.sign]

    def __str__(self) -> str:
        return f"{self.a} {self.sign} {self.b} = {self.result}"


def is_held_out(a: int, sign: str, b: int) -> bool:
    """True if training may not have the operands under this operation, in either order where it commutes."""
    if sign == "/" or max(a, b) <= 10 or (sign == "*" and min(a, b) > 9):
        return False
    if sign in "+*" and a < b:
        a, b = b, a
    return zlib.crc32(f"{a}{sign}{b}".encode()) % 25 == 0


def operands(sampler: Sampler, sign: str) -> tuple[int, int]:
    """Random operands of a random size, larger sizes more often since there are more of them."""
    integer = sampler.rng.randint
    if sign == "*":
        a, b = integer(2, 9), integer(2, 12) if sampler.chance(0.4) else integer(11, 99)
        return (a, b) if sampler.chance(0.5) else (b, a)
    if sign == "/":
        b, quotient = integer(2, 10), integer(1, 12)
        return b * quotient, b
    sizes = (9, 20, 99, 99, 99, 999, 999, 999, 999, 999, 999, 999)
    first = sampler.pick(sizes)
    second = first if sampler.chance(0.7) else sampler.pick(sizes)
    a, b = (integer(size // 10 if sampler.chance(0.8) else 0, size) for size in (first, second))
    if sign == "-" and a < b and not (max(a, b) < 100 and sampler.chance(0.2)):
        a, b = b, a
    return a, b


def draw(sampler: Sampler, sign: str | None = None) -> Sum:
    """A sum for the sampler's part: never held out for training, held out for the other wherever possible."""
    sign = sampler.pick("+++++-----**/") if sign is None else sign
    for _ in range(1000):
        a, b = operands(sampler, sign)
        if is_held_out(a, sign, b) == (sampler.heldout and sign != "/"):
            break
    return Sum(a, sign, b)


def ask(sampler: Sampler, item: Sum | None = None) -> Turn:
    """One sum; the answer is always the bare equation."""
    item = item or draw(sampler)
    fields = {"a": str(item.a), "b": str(item.b), "sign": item.sign, "word": P.signs[item.sign]}
    special = P.train[item.sign] if sampler.chance(0.25) else P.any[0]
    return Turn(sampler.phrase(special, P.any[1], fields), f"{item}.")


def sheet(sampler: Sampler) -> Turn:
    """Several sums at once, answered line by line."""
    sums = [draw(sampler) for _ in range(sampler.rng.randint(3, 12))]
    head = sampler.phrase(*P.sheet)
    tasks = "\n".join(f"{s.a} {s.sign} {s.b}" for s in sums)
    return Turn(f"{head}\n{tasks}", "\n".join(map(str, sums)))


def story(sampler: Sampler) -> Turn:
    """A sum told as a story, answered by the equation and a sentence."""
    item = draw(sampler)
    while item.result < 2 or item.b < 2:
        item = draw(sampler)
    text, conclusion = sampler.pick(P.stories[item.sign])
    fields = {
        "n": sampler.pick(P.names),
        "t": sampler.pick(P.things),
        "a": item.a,
        "b": item.b,
        "c": item.result,
    }
    question = f"{text} {P.ends[conclusion]}".format_map(fields)
    return Turn(question, f"{item}, so {conclusion.format_map(fields)}.")


def steps(sampler: Sampler) -> Turn:
    """Column addition with carries, digit by digit."""
    item = draw(sampler, "+")
    lines, carry, a, b = [], 0, item.a, item.b
    for place in P.places[: len(str(max(a, b)))]:
        total = a % 10 + b % 10 + carry
        parts = f"{a % 10} + {b % 10}" + (f" + {carry}" if carry else "")
        carry = total // 10
        lines.append(
            f"{place}: {parts} = {total}, write {total % 10}" + (f" and carry {carry}." if carry else ".")
        )
        a, b = a // 10, b // 10
    question = sampler.phrase(*P.steps, {"a": str(item.a), "b": str(item.b)})
    return Turn(question, "\n".join(lines) + f"\nThe result is {item}.")


def compare(sampler: Sampler) -> Turn:
    """Which of two numbers is larger or smaller, even or odd."""
    top = sampler.pick((20, 100, 1000))
    a, b = sampler.rng.sample(range(top), 2)
    fields = {"a": str(a), "b": str(b)}
    choice = sampler.rng.randrange(3)
    if choice == 0:
        return Turn(sampler.phrase(*P.larger, fields), f"{max(a, b)} is larger than {min(a, b)}.")
    if choice == 1:
        return Turn(sampler.phrase(*P.smaller, fields), f"{min(a, b)} is smaller than {max(a, b)}.")
    return Turn(sampler.phrase(*P.even, fields), f"{a} is {'odd' if a % 2 else 'even'}.")


def count(sampler: Sampler) -> Turn:
    """Counting up or down, in steps of one or more."""
    start, step, length = (
        sampler.rng.randint(0, 60),
        sampler.pick((1, 1, 1, 2, 3, 5, 10)),
        sampler.rng.randint(4, 16),
    )
    numbers = [start + step * i for i in range(length)]
    down = sampler.chance(0.3)
    if down:
        numbers.reverse()
    fields = {"a": str(numbers[0]), "b": str(numbers[-1]), "s": str(step)}
    way = "Count down" if down else "Count"
    train, held_out = ([t.replace("WAY", way).replace("way", way.lower()) for t in part] for part in P.count)
    end = "." if step == 1 else " in steps of {s}."
    question = sampler.phrase([t + end for t in train], [t + end for t in held_out], fields)
    return Turn(question, ", ".join(map(str, numbers)) + ".")


def in_words(number: int) -> str:
    """A number below 1000 in English words."""
    if number < 20:
        return P.ones[number]
    if number < 100:
        return P.tens[number // 10] + (f"-{P.ones[number % 10]}" if number % 10 else "")
    rest = f" and {in_words(number % 100)}" if number % 100 else ""
    return f"{P.ones[number // 100]} hundred{rest}"


def words(sampler: Sampler) -> Turn:
    """Between digits and words."""
    number = sampler.rng.randrange(sampler.pick((100, 1000)))
    fields = {"n": str(number), "w": in_words(number)}
    if sampler.chance(0.5):
        return Turn(sampler.phrase(*P.in_words, fields), capitalized(in_words(number)) + ".")
    return Turn(sampler.phrase(*P.in_digits, fields), f"{number}.")


def times_table(sampler: Sampler) -> Turn:
    """The products of a number with 1 to 10."""
    n = sampler.rng.randint(2, 10)
    question = sampler.phrase(*P.times_table, {"n": str(n)})
    return Turn(question, "\n".join(str(Sum(n, "*", i)) for i in range(1, 11)))


def ask_any(sampler: Sampler) -> Turn:
    """A turn of any of these forms, single sums most often."""
    weighted = (
        *[ask] * 11,
        *[sheet] * 7,
        *[story] * 3,
        steps,
        steps,
        compare,
        compare,
        count,
        words,
        times_table,
    )
    return sampler.pick(weighted)(sampler)
