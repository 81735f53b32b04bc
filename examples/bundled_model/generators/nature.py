"""Kinds of facts about animals, chemical elements, planets and colours."""

from ..facts import ANIMALS, ELEMENTS, PLANETS, rows
from .common import article, phrasings

P = phrasings("nature")

_ANIMALS = tuple(
    {
        "name": animal.name,
        "a": article(animal.name),
        "plural": animal.plural,
        "group": animal.group,
        "a_group": article(animal.group),
        "sound": animal.sound,
        "young": animal.young,
        "a_young": article(animal.young),
    }
    for animal in ANIMALS
)
_ELEMENTS = tuple({**element._asdict(), "a_category": article(element.category)} for element in ELEMENTS)
_PLANETS = tuple({**planet._asdict(), "a_kind": article(planet.kind)} for planet in PLANETS)
_COLOURS = tuple(
    {"thing": thing, "colour": colour} for kind, thing, colour in rows("colours") if kind == "object"
)
_MIXES = tuple({"mix": mix, "colour": colour} for kind, mix, colour in rows("colours") if kind == "mix")

SOUND = P.kind("sound", tuple(row for row in _ANIMALS if row["sound"] != "-"))
YOUNG = P.kind("young", _ANIMALS)
GROUP = P.kind("group", _ANIMALS)
SYMBOL = P.kind("symbol", _ELEMENTS)
SYMBOL_OF = P.kind("symbol_of", _ELEMENTS)
NUMBER = P.kind("number", _ELEMENTS)
STATE = P.kind("state", _ELEMENTS)
CATEGORY = P.kind("category", _ELEMENTS)
PLANET = P.kind("planet", _PLANETS)
PLANET_KIND = P.kind("planet_kind", tuple(row for row in _PLANETS if row["name"] != "Mercury"))
COLOUR = P.kind("colour", _COLOURS)
MIX = P.kind("mix", _MIXES)
KINDS = (
    SOUND,
    YOUNG,
    GROUP,
    SYMBOL,
    SYMBOL,
    SYMBOL_OF,
    NUMBER,
    NUMBER,
    STATE,
    CATEGORY,
    PLANET,
    PLANET_KIND,
    COLOUR,
    MIX,
)
ANIMAL_ROWS, ELEMENT_ROWS, PLANET_ROWS = _ANIMALS, _ELEMENTS, _PLANETS
