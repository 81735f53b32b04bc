"""Kinds of facts about works and inventions, words, units and the calendar."""

from ..facts import DAYS, MONTHS, SEASONS, pairs, rows
from .common import Kind, Row

_VERBS = {
    "wrote": ("written", "author"),
    "painted": ("painted", "painter"),
    "composed": ("composed", "composer"),
    "discovered": ("discovered", "discoverer"),
    "invented": ("invented", "inventor"),
    "created": ("created", "creator"),
    "formulated": ("formulated", "originator"),
    "sculpted": ("sculpted", "sculptor"),
}
_WORKS: tuple[Row, ...] = tuple(
    {
        "verb": verb,
        "work": work,
        "person": person,
        "participle": _VERBS[verb][0],
        "role": _VERBS[verb][1],
    }
    for verb, work, person in rows("works")
)
_UNITS = tuple({"parts": parts, "whole": whole, "n": count} for parts, whole, count in rows("units"))
_PAIRS = {name: pairs(name) for name in ("opposites", "plurals", "pasts")}
_PAIRS["opposites"] = {x: w for w, x in rows("opposites")} | _PAIRS["opposites"]
_WORDS = {name: tuple({"w": w, "x": x} for w, x in pairs.items()) for name, pairs in _PAIRS.items()}
_DAYS = tuple({"d": day, "next": DAYS[(i + 1) % 7], "prev": DAYS[i - 1]} for i, day in enumerate(DAYS))
_ORDINALS = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
)
_LENGTHS = ("31", "28 or 29", "31", "30", "31", "30", "31", "31", "30", "31", "30", "31")
_MONTHS = tuple(
    {
        "m": month,
        "next": MONTHS[(i + 1) % 12],
        "prev": MONTHS[i - 1],
        "order": _ORDINALS[i],
        "days": _LENGTHS[i],
    }
    for i, month in enumerate(MONTHS)
)
_SEASONS = tuple(
    {"s": season, "next": SEASONS[(i + 1) % 4], "prev": SEASONS[i - 1]} for i, season in enumerate(SEASONS)
)

WORK = Kind(
    "work",
    (
        "Who {verb} {work}?",
        "Who {verb} {work}?",
        "By whom was {work} {participle}?",
        "Who was it that {verb} {work}?",
        "Who is the {role} of {work}?",
        "Who was the {role} of {work}?",
        "Name the {role} of {work}.",
        "Tell me who {verb} {work}.",
        "Do you know who {verb} {work}?",
        "Which person {verb} {work}?",
        "{work} was {participle} by whom?",
    ),
    (
        "Can you tell me who {verb} {work}?",
        "Who is the person who {verb} {work}?",
        "Tell me the {role} of {work}.",
    ),
    "{person} {verb} {work}.",
    "person",
    _WORKS,
)
UNIT = Kind(
    "unit",
    (
        "How many {parts} are there in {whole}?",
        "How many {parts} are in {whole}?",
        "How many {parts} does {whole} have?",
        "{whole} has how many {parts}?",
        "How many {parts} make up {whole}?",
        "What is the number of {parts} in {whole}?",
        "Tell me how many {parts} there are in {whole}.",
        "Number of {parts} in {whole}?",
    ),
    ("Tell me how many {parts} {whole} has.", "Can you tell me how many {parts} are in {whole}?"),
    "{whole} has {n} {parts}.",
    "n",
    _UNITS,
)
OPPOSITE = Kind(
    "opposite",
    (
        'What is the opposite of "{w}"?',
        "What is the opposite of {w}?",
        "What's the opposite of {w}?",
        "Give me the opposite of {w}.",
        "Name the opposite of {w}.",
        "Tell me the opposite of {w}.",
        "Opposite of {w}?",
        'Which word is the opposite of "{w}"?',
        "What is an antonym of {w}?",
        'Give an antonym of "{w}".',
        'Find the opposite of "{w}".',
    ),
    (
        "Which word means the opposite of {w}?",
        "Can you give me the opposite of {w}?",
        "What is the antonym of {w}?",
    ),
    'The opposite of "{w}" is "{x}".',
    "x",
    _WORDS["opposites"],
)
PLURAL = Kind(
    "plural",
    (
        'What is the plural of "{w}"?',
        "What is the plural of {w}?",
        "What's the plural of {w}?",
        "Give me the plural of {w}.",
        "Tell me the plural of {w}.",
        "Plural of {w}?",
        "Make {w} plural.",
        'Write the plural of "{w}".',
        'How do you write the plural of "{w}"?',
        "What is the plural form of {w}?",
    ),
    (
        'What is the plural form of the word "{w}"?',
        "Can you give me the plural of {w}?",
        "Name the plural of {w}.",
    ),
    'The plural of "{w}" is "{x}".',
    "x",
    _WORDS["plurals"],
)
PAST = Kind(
    "past",
    (
        'What is the past tense of "{w}"?',
        "What is the past tense of {w}?",
        "What's the past tense of {w}?",
        "Give me the past tense of {w}.",
        "Tell me the past tense of {w}.",
        "Past tense of {w}?",
        'Put "{w}" in the past tense.',
        'Write the past tense of "{w}".',
        'What is the simple past of "{w}"?',
        "What is the past form of {w}?",
    ),
    (
        'What is the past tense of the verb "{w}"?',
        "Can you give me the past tense of {w}?",
        "Name the past tense of {w}.",
    ),
    'The past tense of "{w}" is "{x}".',
    "x",
    _WORDS["pasts"],
)
DAY_AFTER = Kind(
    "day_after",
    (
        "What day comes after {d}?",
        "Which day comes after {d}?",
        "What is the day after {d}?",
        "Which day follows {d}?",
        "What day follows {d}?",
        "Tell me the day after {d}.",
        "If today is {d}, what day is tomorrow?",
        "Today is {d}. What day is tomorrow?",
    ),
    ("Which day is after {d}?", "What is the next day after {d}?"),
    "{next} comes after {d}.",
    "next",
    _DAYS,
)
DAY_BEFORE = Kind(
    "day_before",
    (
        "What day comes before {d}?",
        "Which day comes before {d}?",
        "What is the day before {d}?",
        "Which day is right before {d}?",
        "Tell me the day before {d}.",
        "If today is {d}, what day was yesterday?",
        "Today is {d}. What day was yesterday?",
        "What day is just before {d}?",
    ),
    ("Which day is before {d}?", "Name the day that comes before {d}."),
    "{prev} comes before {d}.",
    "prev",
    _DAYS,
)
MONTH_AFTER = Kind(
    "month_after",
    (
        "What month comes after {m}?",
        "Which month comes after {m}?",
        "What is the month after {m}?",
        "Which month follows {m}?",
        "What month follows {m}?",
        "Tell me the month after {m}.",
        "Name the month after {m}.",
        "What is the next month after {m}?",
    ),
    ("Which month is after {m}?", "Name the month that comes after {m}."),
    "{next} comes after {m}.",
    "next",
    _MONTHS,
)
MONTH_ORDER = Kind(
    "month_order",
    (
        "What is the {order} month of the year?",
        "Which month is the {order} month of the year?",
        "Name the {order} month of the year.",
        "Which is the {order} month of the year?",
        "Tell me the {order} month of the year.",
        "What's the {order} month?",
        "Which month is the {order}?",
        "What is the {order} month?",
    ),
    ("What month is the {order} of the year?", "Give me the {order} month of the year."),
    "{m} is the {order} month of the year.",
    "m",
    _MONTHS,
)
MONTH_DAYS = Kind(
    "month_days",
    (
        "How many days does {m} have?",
        "How many days are in {m}?",
        "How many days are there in {m}?",
        "What is the number of days in {m}?",
        "Tell me the number of days in {m}.",
        "{m} has how many days?",
        "How long is {m}?",
        "Number of days in {m}?",
    ),
    ("Tell me how many days {m} has.", "Can you tell me how many days are in {m}?"),
    "{m} has {days} days.",
    "days",
    _MONTHS,
)
SEASON = Kind(
    "season",
    (
        "Which season comes after {s}?",
        "What season comes after {s}?",
        "Which season follows {s}?",
        "What is the season after {s}?",
        "What season follows {s}?",
        "Tell me the season after {s}.",
        "Name the season after {s}.",
        "What comes after {s}?",
    ),
    ("Which season is after {s}?", "Name the season that follows {s}."),
    "{next} comes after {s}.",
    "next",
    _SEASONS,
)
KINDS = (
    *(WORK, WORK, WORK, UNIT, OPPOSITE, OPPOSITE, PLURAL, PLURAL, PAST, PAST),
    *(DAY_AFTER, DAY_BEFORE, MONTH_AFTER, MONTH_ORDER, MONTH_DAYS, SEASON),
)
