"""Kinds of facts about countries."""

from ..facts import COUNTRIES, Country
from .common import Row, phrasings

P = phrasings("countries")


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


CAPITAL = P.kind("capital", ROWS)
CAPITAL_OF = P.kind("capital_of", ROWS)
CONTINENT = P.kind("continent", known("continent"))
CURRENCY = P.kind("currency", known("currency"))
LANGUAGE = P.kind("language", known("language"))
KINDS = (CAPITAL, CAPITAL, CAPITAL, CAPITAL_OF, CAPITAL_OF, CONTINENT, CURRENCY, LANGUAGE)
BY_NAME = {kind.name: kind for kind in KINDS}
