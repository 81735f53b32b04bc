"""Sums with whole numbers. Operand pairs chosen by a hash are held out: training never shows their result.

Pairs of small numbers are never held out, because longer sums are made of them.
"""

import zlib
from typing import NamedTuple

from .common import Sampler, Turn, capitalized

SIGNS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


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


TRAIN = {
    "+": (
        "What is the sum of {a} and {b}?",
        "Add {a} and {b}.",
        "What do you get if you add {a} and {b}?",
        "Add {b} to {a}.",
        "The sum of {a} and {b}?",
    ),
    "-": (
        "Subtract {b} from {a}.",
        "What is the difference between {a} and {b}?",
        "Take {b} away from {a}.",
        "What do you get if you subtract {b} from {a}?",
        "What remains of {a} if you take away {b}?",
    ),
    "*": (
        "Multiply {a} by {b}.",
        "What is the product of {a} and {b}?",
        "What is {a} multiplied by {b}?",
        "What is {a} x {b}?",
        "The product of {a} and {b}?",
    ),
    "/": (
        "Divide {a} by {b}.",
        "What do you get if you divide {a} by {b}?",
        "How many times does {b} go into {a}?",
        "How often does {b} go into {a}?",
        "What is the quotient of {a} and {b}?",
    ),
}
ANY_TRAIN = (
    "What is {a} {sign} {b}?",
    "What is {a} {sign} {b}?",
    "What's {a} {sign} {b}?",
    "{a} {sign} {b}",
    "{a} {sign} {b} =",
    "{a}{sign}{b}",
    "{a} {sign} {b}?",
    "Calculate {a} {sign} {b}.",
    "Compute {a} {sign} {b}.",
    "Solve {a} {sign} {b}.",
    "How much is {a} {sign} {b}?",
    "How much is {a} {word} {b}?",
    "What is {a} {word} {b}?",
    "What's {a} {word} {b}?",
    "{a} {word} {b}?",
    "Tell me the result of {a} {sign} {b}.",
    "What is the result of {a} {sign} {b}?",
    "Work out {a} {sign} {b}.",
)
ANY_HELD_OUT = (
    "Can you calculate {a} {sign} {b}?",
    "What does {a} {sign} {b} equal?",
    "Can you tell me what {a} {word} {b} is?",
    "Tell me what {a} {sign} {b} is.",
    "What is the value of {a} {sign} {b}?",
)


def ask(sampler: Sampler, item: Sum | None = None) -> Turn:
    """One sum; the answer is always the bare equation."""
    item = item or draw(sampler)
    fields = {"a": str(item.a), "b": str(item.b), "sign": item.sign, "word": SIGNS[item.sign]}
    special = TRAIN[item.sign] if sampler.chance(0.25) else ANY_TRAIN
    return Turn(sampler.phrase(special, ANY_HELD_OUT, fields), f"{item}.")


SHEETS = ("Solve these:", "Calculate:", "Work these out:", "What are the results?", "Compute the following:")


def sheet(sampler: Sampler) -> Turn:
    """Several sums at once, answered line by line."""
    sums = [draw(sampler) for _ in range(sampler.rng.randint(3, 12))]
    head = sampler.phrase(SHEETS, ("Please solve the following:", "Calculate these sums:"))
    tasks = "\n".join(f"{s.a} {s.sign} {s.b}" for s in sums)
    return Turn(f"{head}\n{tasks}", "\n".join(map(str, sums)))


NAMES = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Hugo",
    "Ida",
    "Jack",
    "Lena",
    "Max",
    "Nora",
    "Paul",
    "Sara",
    "Tom",
)
THINGS = (
    "apples",
    "books",
    "coins",
    "marbles",
    "stamps",
    "cards",
    "flowers",
    "cookies",
    "pencils",
    "shells",
    "eggs",
    "stickers",
)
STORIES = {
    "+": (
        ("{n} has {a} {t} and gets {b} more.", "{n} has {c} {t} now"),
        ("{n} finds {a} {t} on one day and {b} {t} on the next day.", "{n} finds {c} {t} in total"),
        ("There are {a} {t} on the table. {n} adds {b} more.", "there are {c} {t} on the table"),
    ),
    "-": (
        ("{n} has {a} {t} and gives away {b}.", "{n} has {c} {t} left"),
        ("There are {a} {t} in a box. {n} takes out {b} of them.", "there are {c} {t} left in the box"),
        ("{n} has {a} {t} and loses {b} of them.", "{n} has {c} {t} left"),
    ),
    "*": (
        ("{n} has {a} boxes with {b} {t} each.", "{n} has {c} {t} in total"),
        ("{n} buys {b} {t} every day for {a} days.", "{n} buys {c} {t} in total"),
    ),
    "/": (
        ("{n} shares {a} {t} equally among {b} friends.", "each friend gets {c} {t}"),
        ("{n} puts {a} {t} into {b} bags, the same number in each.", "each bag holds {c} {t}"),
    ),
}
ENDS = {
    "{n} has {c} {t} now": "How many {t} does {n} have now?",
    "{n} has {c} {t} left": "How many {t} are left?",
    "{n} has {c} {t} in total": "How many {t} does {n} have in total?",
    "{n} finds {c} {t} in total": "How many {t} does {n} find in total?",
    "{n} buys {c} {t} in total": "How many {t} does {n} buy in total?",
    "there are {c} {t} on the table": "How many {t} are on the table now?",
    "there are {c} {t} left in the box": "How many {t} are left in the box?",
    "each friend gets {c} {t}": "How many {t} does each friend get?",
    "each bag holds {c} {t}": "How many {t} are in each bag?",
}


def story(sampler: Sampler) -> Turn:
    """A sum told as a story, answered by the equation and a sentence."""
    item = draw(sampler)
    while item.result < 2 or item.b < 2:
        item = draw(sampler)
    text, conclusion = sampler.pick(STORIES[item.sign])
    fields = {"n": sampler.pick(NAMES), "t": sampler.pick(THINGS), "a": item.a, "b": item.b, "c": item.result}
    question = f"{text} {ENDS[conclusion]}".format_map(fields)
    return Turn(question, f"{item}, so {conclusion.format_map(fields)}.")


PLACES = ("Ones", "Tens", "Hundreds", "Thousands")


def steps(sampler: Sampler) -> Turn:
    """Column addition with carries, digit by digit."""
    item = draw(sampler, "+")
    lines, carry, a, b = [], 0, item.a, item.b
    for place in PLACES[: len(str(max(a, b)))]:
        total = a % 10 + b % 10 + carry
        parts = f"{a % 10} + {b % 10}" + (f" + {carry}" if carry else "")
        carry = total // 10
        lines.append(
            f"{place}: {parts} = {total}, write {total % 10}" + (f" and carry {carry}." if carry else ".")
        )
        a, b = a // 10, b // 10
    train = (
        "Add {a} and {b} step by step.",
        "Calculate {a} + {b} step by step.",
        "Show me how to add {a} and {b}.",
        "Explain how to calculate {a} + {b}.",
        "How do I add {a} and {b} by hand?",
    )
    held_out = (
        "Show me step by step how to add {a} and {b}.",
        "Explain step by step how to calculate {a} + {b}.",
    )
    question = sampler.phrase(train, held_out, {"a": str(item.a), "b": str(item.b)})
    return Turn(question, "\n".join(lines) + f"\nThe result is {item}.")


def compare(sampler: Sampler) -> Turn:
    """Which of two numbers is larger or smaller, even or odd."""
    top = sampler.pick((20, 100, 1000))
    a, b = sampler.rng.sample(range(top), 2)
    fields = {"a": str(a), "b": str(b)}
    choice = sampler.rng.randrange(3)
    train: tuple[str, ...]
    if choice == 0:
        train = (
            "Which is larger, {a} or {b}?",
            "Which number is larger, {a} or {b}?",
            "Is {a} or {b} larger?",
            "Which is bigger, {a} or {b}?",
            "Which is greater, {a} or {b}?",
            "What is the larger number, {a} or {b}?",
        )
        return Turn(
            sampler.phrase(train, ("Which number is bigger, {a} or {b}?",), fields),
            f"{max(a, b)} is larger than {min(a, b)}.",
        )
    if choice == 1:
        train = (
            "Which is smaller, {a} or {b}?",
            "Which number is smaller, {a} or {b}?",
            "Is {a} or {b} smaller?",
            "Which is less, {a} or {b}?",
            "What is the smaller number, {a} or {b}?",
        )
        return Turn(
            sampler.phrase(train, ("Which of these is smaller, {a} or {b}?",), fields),
            f"{min(a, b)} is smaller than {max(a, b)}.",
        )
    train = (
        "Is {a} even or odd?",
        "Is {a} an even or an odd number?",
        "Is the number {a} even or odd?",
        "Even or odd: {a}?",
        "Tell me if {a} is even or odd.",
    )
    return Turn(
        sampler.phrase(train, ("Is the number {a} odd or even?",), fields),
        f"{a} is {'odd' if a % 2 else 'even'}.",
    )


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
    train: tuple[str, ...] = (
        f"{way} from {{a}} to {{b}}",
        f"Please {way.lower()} from {{a}} to {{b}}",
        f"Can you {way.lower()} from {{a}} to {{b}}",
        f"{way} for me from {{a}} to {{b}}",
    )
    held_out: tuple[str, ...] = (f"I want you to {way.lower()} from {{a}} to {{b}}",)
    end = "." if step == 1 else " in steps of {s}."
    question = sampler.phrase([t + end for t in train], [t + end for t in held_out], fields)
    return Turn(question, ", ".join(map(str, numbers)) + ".")


ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *(
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ),
)
TENS = ("zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """A number below 1000 in English words."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    rest = f" and {in_words(number % 100)}" if number % 100 else ""
    return f"{ONES[number // 100]} hundred{rest}"


def words(sampler: Sampler) -> Turn:
    """Between digits and words."""
    number = sampler.rng.randrange(sampler.pick((100, 1000)))
    fields = {"n": str(number), "w": in_words(number)}
    if sampler.chance(0.5):
        train = (
            "Write {n} in words.",
            "How do you write {n} in words?",
            "Spell out the number {n}.",
            "What is {n} in words?",
            "Write the number {n} in words.",
        )
        return Turn(
            sampler.phrase(train, ("Write out {n} in words.",), fields), capitalized(in_words(number)) + "."
        )
    train = (
        "Write {w} as a number.",
        "Write {w} in digits.",
        "What is {w} in digits?",
        "What number is {w}?",
        "Write the number {w} in digits.",
    )
    return Turn(sampler.phrase(train, ("How do you write {w} in digits?",), fields), f"{number}.")


def times_table(sampler: Sampler) -> Turn:
    """The products of a number with 1 to 10."""
    n = sampler.rng.randint(2, 10)
    train = (
        "Write the multiplication table of {n}.",
        "Show me the times table of {n}.",
        "What is the multiplication table of {n}?",
        "Give me the {n} times table.",
        "List the multiplication table of {n}.",
    )
    question = sampler.phrase(train, ("Write down the times table of {n}.",), {"n": str(n)})
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
