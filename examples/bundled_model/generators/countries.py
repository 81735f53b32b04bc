"""Kinds of facts about countries."""

from ..facts import COUNTRIES, Country
from .common import Kind, Row


def country_row(country: Country) -> Row:
    """The fields that the phrasings use."""
    plural = " and " in country.language
    return {
        "c": country.name,
        "capital": country.capital,
        "continent": country.continent,
        "currency": country.currency,
        "language": country.language,
        "spoken": ("main languages of {} are" if plural else "main language of {} is").format(country.name),
    }


ROWS = tuple(country_row(country) for country in COUNTRIES)


def known(field: str) -> tuple[Row, ...]:
    """The rows that have the field."""
    return tuple(row for row in ROWS if row[field] != "-")


CAPITAL = Kind(
    "capital",
    (
        "What is the capital of {c}?",
        "What is the capital of {c}?",
        "What's the capital of {c}?",
        "What is the capital city of {c}?",
        "Which city is the capital of {c}?",
        "What city is the capital of {c}?",
        "Name the capital of {c}.",
        "Name the capital city of {c}.",
        "Tell me the capital of {c}.",
        "Tell me what the capital of {c} is.",
        "Give me the capital of {c}.",
        "Capital of {c}?",
        "The capital of {c}?",
        "Do you know the capital of {c}?",
        "Can you tell me the capital of {c}?",
        "Could you tell me the capital of {c}?",
        "I would like to know the capital of {c}.",
        "What is the name of the capital of {c}?",
    ),
    (
        "Can you tell me what the capital of {c} is?",
        "Which city serves as the capital of {c}?",
        "Do you know what the capital city of {c} is?",
        "What is the name of the capital city of {c}?",
    ),
    "The capital of {c} is {capital}.",
    "capital",
    ROWS,
)
CAPITAL_OF = Kind(
    "capital_of",
    (
        "Which country has {capital} as its capital?",
        "{capital} is the capital of which country?",
        "What country is {capital} the capital of?",
        "Which country is {capital} the capital of?",
        "Of which country is {capital} the capital?",
        "{capital} is the capital of what country?",
        "Name the country whose capital is {capital}.",
        "Which country's capital is {capital}?",
        "Tell me the country whose capital is {capital}.",
        "What country has {capital} as its capital?",
        "The capital of which country is {capital}?",
    ),
    (
        "What country has the capital {capital}?",
        "Which country's capital city is {capital}?",
        "Tell me which country {capital} is the capital of.",
    ),
    "{capital} is the capital of {c}.",
    "c",
    ROWS,
)
CONTINENT = Kind(
    "continent",
    (
        "On which continent is {c}?",
        "Which continent is {c} in?",
        "What continent is {c} in?",
        "What continent is {c} on?",
        "In which continent is {c}?",
        "Where is {c}?",
        "In what part of the world is {c}?",
        "Tell me the continent of {c}.",
        "Which continent is {c} part of?",
        "To which continent does {c} belong?",
        "Name the continent of {c}.",
        "Do you know which continent {c} is in?",
        "Can you tell me which continent {c} is in?",
        "On which continent can you find {c}?",
    ),
    (
        "Which continent does {c} belong to?",
        "Tell me which continent {c} is in.",
        "On what continent is {c}?",
    ),
    "{c} is in {continent}.",
    "continent",
    known("continent"),
)
CURRENCY = Kind(
    "currency",
    (
        "What is the currency of {c}?",
        "What's the currency of {c}?",
        "What currency is used in {c}?",
        "Which currency is used in {c}?",
        "What currency does {c} use?",
        "Which currency does {c} use?",
        "Name the currency of {c}.",
        "Tell me the currency of {c}.",
        "What money is used in {c}?",
        "Currency of {c}?",
        "Do you know the currency of {c}?",
        "Can you tell me the currency of {c}?",
        "What is the money of {c} called?",
        "What currency do people use in {c}?",
    ),
    (
        "Which currency do people use in {c}?",
        "Tell me which currency {c} uses.",
        "Can you tell me what the currency of {c} is?",
    ),
    "The currency of {c} is the {currency}.",
    "currency",
    known("currency"),
)
LANGUAGE = Kind(
    "language",
    (
        "What language is spoken in {c}?",
        "Which language is spoken in {c}?",
        "What is the language of {c}?",
        "What language do people speak in {c}?",
        "What languages are spoken in {c}?",
        "What is the main language of {c}?",
        "Which language do they speak in {c}?",
        "What do people speak in {c}?",
        "Tell me the main language of {c}.",
        "Name the main language of {c}.",
        "Do you know what language is spoken in {c}?",
        "Can you tell me the language of {c}?",
        "What's the language of {c}?",
        "Language of {c}?",
    ),
    (
        "Which language do people speak in {c}?",
        "Can you tell me what language is spoken in {c}?",
        "Tell me which language is spoken in {c}.",
    ),
    "The {spoken} {language}.",
    "language",
    known("language"),
)
KINDS = (CAPITAL, CAPITAL, CAPITAL, CAPITAL_OF, CAPITAL_OF, CONTINENT, CURRENCY, LANGUAGE)
FOLLOW_UPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "capital": (
        (
            "And its capital?",
            "What is its capital?",
            "And what is the capital?",
            "Which city is its capital?",
            "What about its capital?",
            "And the capital?",
        ),
        ("And what is its capital?", "What is the capital of that country?"),
    ),
    "continent": (
        (
            "And its continent?",
            "Which continent is it in?",
            "What continent is it on?",
            "Where is it?",
            "And where is it?",
            "On which continent is it?",
        ),
        ("And which continent is it in?", "In which continent is it?"),
    ),
    "currency": (
        (
            "And its currency?",
            "What is its currency?",
            "What currency do they use?",
            "And what about the currency?",
            "Which currency is used there?",
            "And the currency?",
        ),
        ("And what is its currency?", "What currency is used there?"),
    ),
    "language": (
        (
            "And its language?",
            "What language do they speak there?",
            "Which language is spoken there?",
            "What do people speak there?",
            "And the language?",
            "What about the language?",
        ),
        ("And which language is spoken there?", "What language is spoken there?"),
    ),
}
BY_NAME = {kind.name: kind for kind in KINDS}
