"""Tasks that rewrite a text: letter case, word order, number, tense, style, spelling, translation."""

from ..facts import LANGUAGES, pairs, rows
from .common import Sampler, Turn, article, capitalized, phrasings
from .values import draw, invented

P = phrasings("rewriting")

_NOUNS = tuple(pairs("plurals"))
_ADJECTIVES = (*tuple(pairs("opposites"))[:12], "red", "green", "blue", "white", "black", "new")
_PLURALS = pairs("plurals")
_PASTS = pairs("pasts")
_PASTS_ALL = {**_PASTS, "laugh": "laughed"}
TRANSLATIONS = rows("translations")


def phrase(sampler: Sampler) -> str:
    """A few plain words without punctuation."""
    noun, adjective, place = sampler.pick(_NOUNS), sampler.pick(_ADJECTIVES), sampler.pick(P.places)
    doer, act, when = sampler.pick(P.doers), sampler.pick(P.acts), sampler.pick(P.when)
    return sampler.pick(
        (
            f"the {adjective} {noun}",
            f"{article(adjective)} {noun} {place}",
            f"{doer} {act} {when}",
            f"the {noun} is {adjective}",
            f"my {noun} and your {sampler.pick(_NOUNS)}",
            f"{doer} have {article(adjective)} {noun}",
            f"there is {article(noun)} {place}",
            sampler.pick(TRANSLATIONS)[0].rstrip("?!"),
        )
    )


def _task(sampler: Sampler, name: str, text: str, answer: str) -> Turn:
    return Turn(sampler.phrase(*P[name], {"t": text}, exact=True), answer)


def upper(sampler: Sampler) -> Turn:
    """Uppercase."""
    text = phrase(sampler)
    return _task(sampler, "upper", text, text.upper())


def lower(sampler: Sampler) -> Turn:
    """Lowercase."""
    text = phrase(sampler).lower()
    return _task(sampler, "lower", text.upper(), text)


def backwards(sampler: Sampler) -> Turn:
    """The words in reverse order."""
    text = phrase(sampler)
    return _task(sampler, "backwards", text, " ".join(reversed(text.split())))


def alphabetical(sampler: Sampler) -> Turn:
    """Words in alphabetical order."""
    words = sampler.rng.sample(_NOUNS, sampler.rng.randint(3, 5))
    return _task(sampler, "alphabetical", ", ".join(words), ", ".join(sorted(words)))


def plural(sampler: Sampler) -> Turn:
    """A phrase "the big house" in the plural."""
    noun, adjective = sampler.pick(_NOUNS), sampler.pick(_ADJECTIVES)
    return _task(sampler, "plural", f"the {adjective} {noun}", f"the {adjective} {_PLURALS[noun]}")


def past(sampler: Sampler) -> Turn:
    """A sentence in the past tense."""
    doer, act, when = capitalized(sampler.pick(P.doers)), sampler.pick(P.acts), sampler.pick(P.when)
    return _task(sampler, "past", f"{doer} {act} {when}.", f"{doer} {_PASTS_ALL[act]} {when}.")


def formal(sampler: Sampler) -> Turn:
    """Informal to formal."""
    informal, text = sampler.pick(rows("formal"))
    return _task(sampler, "formal", informal, text)


def spell(sampler: Sampler) -> Turn:
    """A word letter by letter."""
    word = sampler.pick(_NOUNS)
    return _task(sampler, "spell", word, "-".join(word) + ".")


def repeat(sampler: Sampler) -> Turn:
    """Names, codes, messages and invented words, as they are: practice in copying, which calls of tools need."""
    kinds = P.repeated if sampler.heldout else P.repeated + P.repeated_in_training
    text = ", ".join(draw(sampler, sampler.pick(kinds)).text for _ in range(sampler.rng.randint(1, 5)))
    return _task(sampler, "repeat", text, text)


def look_up(sampler: Sampler) -> Turn:
    """One of a few invented names with their values: practice in finding what to copy."""
    found = {
        invented(sampler): draw(sampler, sampler.pick(P.looked_up)).text
        for _ in range(sampler.rng.randint(2, 6))
    }
    key, value = sampler.pick(list(found.items()))
    form = sampler.pick(("{} is {}", "{} = {}", "{}: {}", "{} has {}"))
    pairs = sampler.pick((", ", "; ")).join(form.format(*pair) for pair in found.items())
    fields = {"pairs": pairs, "key": key}
    return Turn(sampler.phrase(*P.look_up, fields, exact=True), value)


_FROM_ENGLISH = tuple(
    {"e": row[0], "l": language, "f": row[i]}
    for row in TRANSLATIONS
    for i, language in enumerate(LANGUAGES, 1)
)
_MEANINGS: dict[str, set[tuple[str, str]]] = {}
for _row in _FROM_ENGLISH:
    _MEANINGS.setdefault(_row["f"].lower(), set()).add((_row["e"], _row["l"]))
TO = P.kind("translate", _FROM_ENGLISH)
FROM = P.kind("meaning", tuple(row for row in _FROM_ENGLISH if len(_MEANINGS[row["f"].lower()]) == 1))


def translate(sampler: Sampler) -> Turn:
    """A translation from or, less often, into English."""
    return (TO if sampler.chance(0.7) else FROM).ask(sampler)


def all_languages(sampler: Sampler) -> Turn:
    """A phrase in all four languages."""
    row = sampler.pick(TRANSLATIONS)
    question = sampler.phrase(*P.all_languages, {"e": row[0]})
    return Turn(
        question,
        "\n".join(f"- {language}: {text}" for language, text in zip(LANGUAGES, row[1:], strict=True)),
    )


REWRITES = (upper, lower, backwards, alphabetical, plural, past, formal, spell)


def ask_any(sampler: Sampler) -> Turn:
    """A rewriting task."""
    return sampler.pick(REWRITES)(sampler)


def ask_translation(sampler: Sampler) -> Turn:
    """A translation task."""
    return all_languages(sampler) if sampler.chance(0.12) else translate(sampler)
