"""Kinds of facts about works and inventions, words, units and the calendar."""

from ..facts import DAYS, MONTHS, SEASONS, pairs, rows
from .common import Row, phrasings

P = phrasings("culture")

_WORKS: tuple[Row, ...] = tuple(
    {"verb": verb, "work": work, "person": person, "participle": P.verbs[verb][0], "role": P.verbs[verb][1]}
    for verb, work, person in rows("works")
)
_UNITS = tuple({"parts": parts, "whole": whole, "n": count} for parts, whole, count in rows("units"))
_PAIRS = {name: pairs(name) for name in ("opposites", "plurals", "pasts")}
_PAIRS["opposites"] = {x: w for w, x in rows("opposites")} | _PAIRS["opposites"]
_WORDS = {name: tuple({"w": w, "x": x} for w, x in pairs.items()) for name, pairs in _PAIRS.items()}
_DAYS = tuple({"d": day, "next": DAYS[(i + 1) % 7], "prev": DAYS[i - 1]} for i, day in enumerate(DAYS))
_MONTHS = tuple(
    {
        "m": month,
        "next": MONTHS[(i + 1) % 12],
        "prev": MONTHS[i - 1],
        "order": P.ordinals[i],
        "days": P.lengths[i],
    }
    for i, month in enumerate(MONTHS)
)
_SEASONS = tuple(
    {"s": season, "next": SEASONS[(i + 1) % 4], "prev": SEASONS[i - 1]} for i, season in enumerate(SEASONS)
)

WORK = P.kind("work", _WORKS)
UNIT = P.kind("unit", _UNITS)
OPPOSITE = P.kind("opposite", _WORDS["opposites"])
PLURAL = P.kind("plural", _WORDS["plurals"])
PAST = P.kind("past", _WORDS["pasts"])
DAY_AFTER = P.kind("day_after", _DAYS)
DAY_BEFORE = P.kind("day_before", _DAYS)
MONTH_AFTER = P.kind("month_after", _MONTHS)
MONTH_ORDER = P.kind("month_order", _MONTHS)
MONTH_DAYS = P.kind("month_days", _MONTHS)
SEASON = P.kind("season", _SEASONS)
KINDS = (
    *(WORK, WORK, WORK, UNIT, OPPOSITE, OPPOSITE, PLURAL, PLURAL, PAST, PAST),
    *(DAY_AFTER, DAY_BEFORE, MONTH_AFTER, MONTH_ORDER, MONTH_DAYS, SEASON),
)
