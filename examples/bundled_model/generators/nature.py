"""Kinds of facts about animals, chemical elements, planets and colours."""

from ..facts import ANIMALS, ELEMENTS, PLANETS, rows
from .common import Kind, article

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

SOUND = Kind(
    "sound",
    (
        "What sound does {a} make?",
        "What noise does {a} make?",
        "Which sound does {a} make?",
        "What does {a} do to make a sound?",
        "How does {a} sound?",
        "Tell me the sound of {a}.",
        "What is the sound of {a}?",
        "What sound do {plural} make?",
        "Can you tell me what sound {a} makes?",
        "Sound of {a}?",
    ),
    ("Tell me what sound {a} makes.", "Which noise does {a} make?", "What is the sound that {a} makes?"),
    "{a} {sound}.",
    "sound",
    tuple(row for row in _ANIMALS if row["sound"] != "-"),
)
YOUNG = Kind(
    "young",
    (
        "What is a young {name} called?",
        "What is a baby {name} called?",
        "What do you call a young {name}?",
        "What do you call a baby {name}?",
        "What's a baby {name} called?",
        "Tell me what a baby {name} is called.",
        "What is the name of a baby {name}?",
        "How is a young {name} called?",
        "What are baby {plural} called?",
        "Name the young of {a}.",
        "Can you tell me what a baby {name} is called?",
    ),
    (
        "What is the name for a baby {name}?",
        "Tell me what a young {name} is called.",
        "What are young {plural} called?",
    ),
    "A young {name} is called {a_young}.",
    "young",
    _ANIMALS,
)
GROUP = Kind(
    "group",
    (
        "What kind of animal is {a}?",
        "What type of animal is {a}?",
        "Which kind of animal is {a}?",
        "Which group of animals does {a} belong to?",
        "What class of animal is {a}?",
        "To which class of animals does {a} belong?",
        "What sort of animal is {a}?",
        "What kind of animals are {plural}?",
        "Tell me what kind of animal {a} is.",
        "Is {a} a mammal, a bird, a fish or something else?",
    ),
    ("Which type of animal is {a}?", "Can you tell me what kind of animal {a} is?"),
    "{a} is {a_group}.",
    "group",
    _ANIMALS,
)
SYMBOL = Kind(
    "symbol",
    (
        "What is the chemical symbol of {name}?",
        "What is the symbol of {name}?",
        "What is the chemical symbol for {name}?",
        "What's the symbol for {name}?",
        "Which symbol does {name} have?",
        "Tell me the chemical symbol of {name}.",
        "Name the symbol of {name}.",
        "Symbol of {name}?",
        "What symbol stands for {name}?",
        "How is {name} written as a chemical symbol?",
        "Can you tell me the symbol of {name}?",
    ),
    (
        "Which chemical symbol does {name} have?",
        "Tell me the symbol for {name}.",
        "What is the element symbol of {name}?",
    ),
    "The chemical symbol of {name} is {symbol}.",
    "symbol",
    _ELEMENTS,
)
SYMBOL_OF = Kind(
    "symbol_of",
    (
        "Which element has the symbol {symbol}?",
        "What element has the symbol {symbol}?",
        "Which chemical element has the symbol {symbol}?",
        "{symbol} is the symbol of which element?",
        "What does the chemical symbol {symbol} stand for?",
        "Which element is {symbol}?",
        "Name the element with the symbol {symbol}.",
        "What element is {symbol}?",
        "Tell me the element with the symbol {symbol}.",
    ),
    ("Which element does the symbol {symbol} stand for?", "What is the element with the symbol {symbol}?"),
    "{symbol} is the symbol of {name}.",
    "name",
    _ELEMENTS,
)
NUMBER = Kind(
    "number",
    (
        "What is the atomic number of {name}?",
        "What's the atomic number of {name}?",
        "Which atomic number does {name} have?",
        "Tell me the atomic number of {name}.",
        "What atomic number does {name} have?",
        "Atomic number of {name}?",
        "How many protons does {name} have?",
        "How many protons does an atom of {name} have?",
        "Name the atomic number of {name}.",
        "Give me the atomic number of {name}.",
    ),
    ("Can you tell me the atomic number of {name}?", "Do you know the atomic number of {name}?"),
    "The atomic number of {name} is {number}.",
    "number",
    _ELEMENTS,
)
STATE = Kind(
    "state",
    (
        "Is {name} a solid, a liquid or a gas?",
        "What is the state of {name} at room temperature?",
        "Is {name} a gas at room temperature?",
        "What state is {name} in at room temperature?",
        "Tell me the state of {name} at room temperature.",
        "At room temperature, is {name} solid, liquid or gas?",
        "Is {name} solid or liquid at room temperature?",
        "In which state is {name} at room temperature?",
    ),
    ("In what state is {name} at room temperature?", "Which state does {name} have at room temperature?"),
    "{name} is a {state} at room temperature.",
    "state",
    _ELEMENTS,
)
CATEGORY = Kind(
    "category",
    (
        "What kind of element is {name}?",
        "What type of element is {name}?",
        "Which group of elements does {name} belong to?",
        "What sort of element is {name}?",
        "Tell me what kind of element {name} is.",
        "Is {name} a metal, a halogen, a noble gas or something else?",
        "Which kind of element is {name}?",
        "Which family of elements is {name} in?",
    ),
    ("Which type of element is {name}?", "Can you tell me what kind of element {name} is?"),
    "{name} is {a_category}.",
    "category",
    _ELEMENTS,
)
PLANET = Kind(
    "planet",
    (
        "Which planet is the {order} from the Sun?",
        "What is the {order} planet from the Sun?",
        "Name the {order} planet from the Sun.",
        "What is the {order} planet of the Solar System?",
        "Which planet is {order} from the Sun?",
        "Tell me the {order} planet from the Sun.",
        "What's the {order} planet from the Sun?",
        "Which is the {order} planet from the Sun?",
    ),
    ("What is the name of the {order} planet from the Sun?", "Which planet comes {order} from the Sun?"),
    "{name} is the {order} planet from the Sun.",
    "name",
    _PLANETS,
)
PLANET_KIND = Kind(
    "planet_kind",
    (
        "What kind of planet is {name}?",
        "What type of planet is {name}?",
        "What is {name}?",
        "Tell me about {name}.",
        "Tell me about the planet {name}.",
        "Describe the planet {name}.",
        "Describe {name}.",
        "What do you know about the planet {name}?",
    ),
    ("What can you tell me about the planet {name}?", "Give me some facts about the planet {name}."),
    "{name} is {a_kind}. It is the {order} planet from the Sun and is {note}.",
    "kind",
    tuple(row for row in _PLANETS if row["name"] != "Mercury"),
)
COLOUR = Kind(
    "colour",
    (
        "What colour is {thing}?",
        "What color is {thing}?",
        "Which colour is {thing}?",
        "Which colour does {thing} have?",
        "What colour does {thing} have?",
        "Tell me the colour of {thing}.",
        "What is the colour of {thing}?",
        "Name the colour of {thing}.",
    ),
    ("Tell me what colour {thing} is.", "What is the color of {thing}?"),
    "{thing} is {colour}.",
    "colour",
    _COLOURS,
)
MIX = Kind(
    "mix",
    (
        "What colour do you get if you mix {mix}?",
        "What do {mix} make?",
        "Mix {mix}. What colour do you get?",
        "Which colour do {mix} make?",
        "What colour do {mix} make?",
        "What happens if I mix {mix}?",
        "If I mix {mix}, what colour do I get?",
        "Which colour do you get from {mix}?",
    ),
    ("Which colour do you get when you mix {mix}?", "What colour do {mix} make together?"),
    "{mix} make {colour}.",
    "colour",
    _MIXES,
)
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
