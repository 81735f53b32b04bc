"""Values of arguments and fields: how a question says them and what JSON has. Some are held out: training never has
them, as chosen by a hash."""

import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..facts import ANIMALS, CATEGORIES, COUNTRIES, MONTHS
from .common import NUMBER_WORDS, Sampler, capitalized, join, phrasings

P = phrasings("values")

Schema = dict[str, Any]


class Value(NamedTuple):
    """The text of a question and the JSON value."""

    text: str
    json: Any


def is_held_out(value: object) -> bool:
    """True for 1 in 12 texts and numbers, small whole numbers and booleans apart."""
    if isinstance(value, bool) or value is None or (isinstance(value, int) and value <= 30):
        return False
    return zlib.crc32(json.dumps(value, ensure_ascii=False).encode()) % 12 == 0


_CAPITALS = tuple(country.capital for country in COUNTRIES)
_COUNTRIES = tuple(country.name.removeprefix("the ") for country in COUNTRIES)
_ITEMS = tuple(item for name in ("fruits", "vegetables") for item in CATEGORIES[name])


def invented(sampler: Sampler) -> str:
    """A word of two or three syllables that means nothing; for training also of other lengths and letters."""
    if not sampler.heldout and sampler.chance(0.3):
        parts = [
            sampler.pick(P.more_starts) + sampler.pick(P.more_vowels)
            for _ in range(sampler.rng.randint(1, 4))
        ]
        return "".join(parts) + sampler.pick(P.more_ends)
    count = 2 if sampler.chance(0.7) else 3
    syllables = [sampler.pick(P.starts) + sampler.pick(P.vowels) for _ in range(count)]
    return "".join(syllables) + sampler.pick(P.ends)


def _common(sampler: Sampler, share: float) -> bool:
    """Whether to take a known word, for training half as often: only copying finds the others."""
    return sampler.chance(share if sampler.heldout else share / 2)


def _digits(sampler: Sampler, count: int) -> str:
    return "".join(sampler.pick("0123456789") for _ in range(count))


def _word(sampler: Sampler) -> str:
    return sampler.pick(P.nouns) if _common(sampler, 0.4) else invented(sampler)


def _name(sampler: Sampler) -> str:
    return sampler.pick(P.names) if _common(sampler, 0.4) else capitalized(invented(sampler))


def _person(sampler: Sampler) -> str:
    return _name(sampler) + (" " + capitalized(invented(sampler)) if sampler.chance(0.25) else "")


def _place(sampler: Sampler) -> str:
    return sampler.pick(_CAPITALS) if _common(sampler, 0.4) else capitalized(invented(sampler))


def _code(sampler: Sampler) -> str:
    if not sampler.heldout and sampler.chance(0.4):
        parts = [sampler.pick("0123456789ABCDEFGHKLMNPQRSTUVWXYZ-") for _ in range(sampler.rng.randint(2, 9))]
        text = "".join(parts).strip("-").replace("--", "-")
        return text if len(text) > 3 and not text.isdigit() else _digits(sampler, sampler.rng.randint(4, 12))
    letters = "".join(sampler.pick("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(sampler.rng.randint(1, 3)))
    return letters + sampler.pick(("-", "", "-")) + _digits(sampler, sampler.rng.randint(3, 5))


def _message(sampler: Sampler) -> str:
    subject = sampler.pick(P.subjects) if sampler.chance(0.5) else _name(sampler)
    return f"{subject} {sampler.pick(P.acts)} {sampler.pick(P.when)}"


def _query(sampler: Sampler) -> str:
    what = f"{sampler.pick(P.adjectives)} {sampler.pick(P.things)}" if sampler.chance(0.5) else _word(sampler)
    return what + (f" in {_place(sampler)}" if sampler.chance(0.4) else "")


def _file(sampler: Sampler) -> str:
    folder = _word(sampler) + "/" if sampler.chance(0.3) else ""
    number = f"_{sampler.rng.randint(1, 99)}" if sampler.chance(0.4) else ""
    return f"{folder}{_word(sampler)}{number}.{sampler.pick(P.endings)}"


def _condition(sampler: Sampler) -> str:
    return f"{_word(sampler)} {sampler.pick(('>', '<', '='))} {sampler.rng.randint(0, 99)}"


def _of(sampler: Sampler, words: Sequence[str]) -> str:
    return invented(sampler) if not sampler.heldout and sampler.chance(0.25) else sampler.pick(words)


def _title(sampler: Sampler) -> str:
    if not sampler.heldout and sampler.chance(0.4):
        words = [capitalized(_word(sampler)) for _ in range(sampler.rng.randint(1, 4))]
        return sampler.pick((" ", " ", " of ", " and ")).join(words)
    return f"The {capitalized(sampler.pick(P.adjectives))} {capitalized(_word(sampler))}"


_TEXTS: dict[str, Callable[[Sampler], str]] = {
    "word": _word,
    "person": _person,
    "place": _place,
    "code": _code,
    "message": _message,
    "query": _query,
    "file": _file,
    "condition": _condition,
    "country": lambda s: s.pick(_COUNTRIES),
    "animal": lambda s: s.pick(ANIMALS).name,
    "room": lambda s: s.pick(P.rooms) if s.chance(0.6) else f"{s.pick(P.adjectives)} {_of(s, P.rooms)}",
    "item": lambda s: _of(s, _ITEMS) if s.chance(0.6) else f"{s.pick(P.adjectives)} {_of(s, P.things)}",
    "product": lambda s: f"{s.pick(P.adjectives)} {_of(s, P.things)}",
    "title": _title,
    "event": lambda s: f"{s.pick(P.adjectives)} {_of(s, P.events)}",
    "task": lambda s: f"{s.pick(P.verbs)} the {s.pick(P.adjectives)} {s.pick(P.things)}",
    "street": lambda s: f"{capitalized(_word(s))} {s.pick(('Street', 'Road', 'Lane'))}",
    "ticker": lambda s: "".join(s.pick("ABCDEFGHIKLMNOPRSTUVX") for _ in range(s.rng.randint(3, 4))),
    "phone": lambda s: f"0{_digits(s, 3)} {_digits(s, s.rng.randint(4, 6))}",
    "email": lambda s: f"{_name(s).lower()}@{_word(s)}.{s.pick(P.domains)}",
    "url": lambda s: f"https://{_word(s)}.{s.pick(P.domains)}/{_word(s)}",
    "host": lambda s: f"{_word(s)}-{s.rng.randint(1, 99)}",
}


def _date(sampler: Sampler) -> Value:
    year, month, day = sampler.rng.randint(2024, 2031), sampler.rng.randint(1, 12), sampler.rng.randint(1, 28)
    name = MONTHS[month - 1]
    iso = f"{year}-{month:02}-{day:02}"
    return Value(sampler.pick((f"{day} {name} {year}", f"{name} {day}, {year}", iso)), iso)


def _time(sampler: Sampler) -> Value:
    hour, minute = sampler.rng.randint(0, 23), sampler.pick((0, 0, 15, 30, sampler.rng.randint(1, 59)))
    exact = f"{hour:02}:{minute:02}"
    if not 1 <= hour <= 11 and hour < 13:
        return Value(exact, exact)
    half = f"{hour % 12} {'am' if hour < 12 else 'pm'}"
    short = half if minute == 0 else half.replace(" ", f":{minute:02} ")
    return Value(sampler.pick((exact, short)), exact)


def _minutes(sampler: Sampler) -> Value:
    words = {15: "a quarter of an hour", 30: "half an hour", 60: "an hour", 90: "an hour and a half"}
    hours, minutes = sampler.rng.randint(2, 9), sampler.rng.randint(2, 59)
    choice = sampler.rng.random()
    if choice < 0.5:
        return Value(f"{minutes} minutes", minutes)
    if choice < 0.7:
        return Value(f"{hours} hours", 60 * hours)
    if choice < 0.85:
        return Value(f"{hours} hours and {minutes} minutes", 60 * hours + minutes)
    found = sampler.pick(tuple(words))
    return Value(words[found], found)


def _percent(sampler: Sampler) -> Value:
    found = sampler.rng.randint(1, 99)
    return Value(sampler.pick((f"{found}%", f"{found} percent")), found)


def _number(sampler: Sampler, low: str, high: str) -> Value:
    found = sampler.rng.randint(round(10 * float(low)), 10 * int(high)) / 10
    value = int(found) if found == int(found) or (found > 20 and sampler.chance(0.4)) else found
    return Value(str(value), value)


def _int(sampler: Sampler, low: str, high: str) -> Value:
    found = sampler.rng.randint(int(low), int(high))
    word = found < len(NUMBER_WORDS) and sampler.chance(0.25)
    return Value(NUMBER_WORDS[found] if word else str(found), found)


_COMPUTED: dict[str, tuple[Schema, Callable[..., Value]]] = {
    "date": ({"type": "string", "format": "date"}, _date),
    "time": ({"type": "string"}, _time),
    "minutes": ({"type": "integer"}, _minutes),
    "percent": ({"type": "integer", "minimum": 0, "maximum": 100}, _percent),
    "number": ({"type": "number"}, _number),
    "int": ({"type": "integer"}, _int),
}


def _record(parts: str) -> dict[str, str]:
    return dict(part.split("=") for part in parts.split("; "))


def options(kinds: Sequence[str]) -> list[Value]:
    """The values of an enumeration, `json=text` or both alike."""
    pairs = [option.split("=") for option in kinds]
    return [Value(pair[-1], pair[0]) for pair in pairs]


def draw(sampler: Sampler, kind: str) -> Value:
    """A value of a kind as `tools.md` names it: of the sampler's part, never held out for training, held out for the
    other wherever possible."""
    name, _, rest = kind.partition(" ")
    if name == "enum":
        return sampler.pick(options(rest.split("/")))
    if name == "bool":
        text = sampler.pick(rest.split("/"))
        return Value(text, text == rest.split("/")[0])
    if name == "list":
        drawn = [draw(sampler, rest) for _ in range(sampler.pick((1, 2, 2, 3, 3, 4)))]
        parts = list({part.text: part for part in drawn}.values())
        return Value(join([part.text for part in parts]), [part.json for part in parts])
    if name == "record":
        found = {key: draw(sampler, part) for key, part in _record(rest).items()}
        text = join([f"the {key} {part.text}" for key, part in found.items()])
        return Value(text, {key: part.json for key, part in found.items()})
    if name in P.objects:
        kinds, text = P.objects[name]
        found = {key: draw(sampler, part) for key, part in kinds.items()}
        fields = {key: str(part.json) for key, part in found.items()}
        return Value(text.format_map(fields), {key: part.json for key, part in found.items()})
    for _ in range(400):
        if name in _COMPUTED:
            value = _COMPUTED[name][1](sampler, *rest.split())
        else:
            text = _TEXTS[name](sampler)
            value = Value(text, text)
        if is_held_out(value.json) == sampler.heldout:
            break
    return value


def schema(kind: str) -> Schema:
    """The JSON schema of a kind."""
    name, _, rest = kind.partition(" ")
    if name == "enum":
        return {"type": "string", "enum": [option.json for option in options(rest.split("/"))]}
    if name == "bool":
        return {"type": "boolean"}
    if name == "list":
        return {"type": "array", "items": schema(rest)}
    if name == "record" or name in P.objects:
        kinds = _record(rest) if name == "record" else P.objects[name][0]
        return object_schema({key: schema(part) for key, part in kinds.items()}, list(kinds))
    return dict(_COMPUTED[name][0]) if name in _COMPUTED else {"type": "string"}


def object_schema(properties: Schema, required: Sequence[str]) -> Schema:
    """The schema of an object."""
    return {"type": "object", "properties": properties, "required": list(required)}


def plain(value: object) -> str:
    """A JSON value as a sentence has it."""
    if isinstance(value, dict):
        return plain(list(value.values()))
    return join([plain(part) for part in value]) if isinstance(value, list) else str(value)
