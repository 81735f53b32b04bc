"""Tasks that rewrite a text: letter case, word order, number, tense, style, spelling, translation."""

from ..facts import LANGUAGES, pairs, rows
from .common import Kind, Sampler, Turn, article, capitalized
from .values import draw, invented

_NOUNS = tuple(pairs("plurals"))
_ADJECTIVES = (*tuple(pairs("opposites"))[:12], "red", "green", "blue", "white", "black", "new")
_PLURALS = pairs("plurals")
_PASTS = pairs("pasts")
_PLACES = (
    "in the garden",
    "in the house",
    "at school",
    "by the river",
    "in the city",
    "near the church",
    "under the tree",
)
_DOERS = ("I", "we", "they", "you", "my friends", "the children", "the teachers", "our cats", "two women")
_ACTS = (
    "walk",
    "play",
    "jump",
    "work",
    "help",
    "cook",
    "dance",
    "smile",
    "study",
    "cry",
    "travel",
    "sing",
    "swim",
    "sleep",
    "run",
    "eat",
    "drink",
    "write",
    "speak",
    "drive",
    "fight",
    "teach",
    "laugh",
    "sit",
    "stand",
)
_WHEN = (
    "every day",
    "in the morning",
    "at home",
    "in the garden",
    "at school",
    "with a friend",
    "in the city",
)
_PASTS_ALL = {**_PASTS, "laugh": "laughed"}
TRANSLATIONS = rows("translations")


def phrase(sampler: Sampler) -> str:
    """A few plain words without punctuation."""
    noun, adjective, place = sampler.pick(_NOUNS), sampler.pick(_ADJECTIVES), sampler.pick(_PLACES)
    doer, act, when = sampler.pick(_DOERS), sampler.pick(_ACTS), sampler.pick(_WHEN)
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


def _task(
    sampler: Sampler, train: tuple[str, ...], held_out: tuple[str, ...], text: str, answer: str
) -> Turn:
    return Turn(sampler.phrase(train, held_out, {"t": text}, exact=True), answer)


def upper(sampler: Sampler) -> Turn:
    """Uppercase."""
    text = phrase(sampler)
    train = (
        "Write in uppercase: {t}",
        "Convert to uppercase: {t}",
        "Put this in capital letters: {t}",
        "Make this uppercase: {t}",
        'Write "{t}" in uppercase.',
        'Write "{t}" in capital letters.',
        'Convert "{t}" to uppercase.',
        "Uppercase: {t}",
    )
    return _task(
        sampler,
        train,
        ("Rewrite in uppercase: {t}", 'Put "{t}" in uppercase.', "Write this in capital letters: {t}"),
        text,
        text.upper(),
    )


def lower(sampler: Sampler) -> Turn:
    """Lowercase."""
    text = phrase(sampler).lower()
    train = (
        "Write in lowercase: {t}",
        "Convert to lowercase: {t}",
        "Put this in small letters: {t}",
        "Make this lowercase: {t}",
        'Write "{t}" in lowercase.',
        'Convert "{t}" to lowercase.',
        "Lowercase: {t}",
        'Write "{t}" in small letters.',
    )
    return _task(sampler, train, ("Rewrite in lowercase: {t}", 'Put "{t}" in lowercase.'), text.upper(), text)


def backwards(sampler: Sampler) -> Turn:
    """The words in reverse order."""
    text = phrase(sampler)
    train = (
        "Reverse the order of the words: {t}",
        "Reverse the word order: {t}",
        "Write the words in reverse order: {t}",
        'Reverse the words in "{t}".',
        'Reverse the order of the words in "{t}".',
        "Put these words in reverse order: {t}",
        "Reverse these words: {t}",
        "Turn the word order around: {t}",
    )
    return _task(
        sampler,
        train,
        ("Write these words in reverse order: {t}", 'Reverse the word order of "{t}".'),
        text,
        " ".join(reversed(text.split())),
    )


def alphabetical(sampler: Sampler) -> Turn:
    """Words in alphabetical order."""
    words = sampler.rng.sample(_NOUNS, sampler.rng.randint(3, 5))
    train = (
        "Sort these words: {t}",
        "Sort alphabetically: {t}",
        "Put these words in alphabetical order: {t}",
        "Sort the words alphabetically: {t}",
        "Order these words alphabetically: {t}",
        "Alphabetical order, please: {t}",
        "Arrange in alphabetical order: {t}",
        "Sort the following words: {t}",
    )
    return _task(
        sampler,
        train,
        ("Sort these words alphabetically: {t}", "Please sort the following words: {t}"),
        ", ".join(words),
        ", ".join(sorted(words)),
    )


def plural(sampler: Sampler) -> Turn:
    """A phrase "the big house" in the plural."""
    noun, adjective = sampler.pick(_NOUNS), sampler.pick(_ADJECTIVES)
    train = (
        "Make plural: {t}",
        "Write in the plural: {t}",
        "Put this in the plural: {t}",
        'Write "{t}" in the plural.',
        'Put "{t}" into the plural.',
        "Turn into the plural: {t}",
        "Change to plural: {t}",
        "Plural: {t}",
    )
    return _task(
        sampler,
        train,
        ("Put into the plural: {t}", 'Make "{t}" plural.'),
        f"the {adjective} {noun}",
        f"the {adjective} {_PLURALS[noun]}",
    )


def past(sampler: Sampler) -> Turn:
    """A sentence in the past tense."""
    doer, act, when = capitalized(sampler.pick(_DOERS)), sampler.pick(_ACTS), sampler.pick(_WHEN)
    train = (
        "Put into the past tense: {t}",
        "Write in the past tense: {t}",
        "Change to the past tense: {t}",
        "Rewrite in the past tense: {t}",
        'Write "{t}" in the past tense.',
        "Past tense: {t}",
        "Turn into the past tense: {t}",
        "Put this sentence in the past tense: {t}",
    )
    return _task(
        sampler,
        train,
        ("Put this into the past tense: {t}", "Write this sentence in the past tense: {t}"),
        f"{doer} {act} {when}.",
        f"{doer} {_PASTS_ALL[act]} {when}.",
    )


def formal(sampler: Sampler) -> Turn:
    """Informal to formal."""
    informal, text = sampler.pick(rows("formal"))
    train = (
        "Make this formal: {t}",
        "Write this in a formal way: {t}",
        "Rewrite formally: {t}",
        "Make this more formal: {t}",
        "Say this formally: {t}",
        'Write "{t}" in a formal style.',
        "Formal version: {t}",
        "Turn this into formal English: {t}",
    )
    return _task(
        sampler,
        train,
        ("Rewrite this in a formal way: {t}", "Put this in formal English: {t}"),
        informal,
        text,
    )


def spell(sampler: Sampler) -> Turn:
    """A word letter by letter."""
    word = sampler.pick(_NOUNS)
    train = (
        'Spell the word "{t}".',
        'Spell "{t}".',
        "How do you spell {t}?",
        'How is "{t}" spelled?',
        "Spell {t}.",
        "Spell {t} for me.",
        'Can you spell "{t}"?',
        "Write {t} letter by letter.",
    )
    return _task(
        sampler,
        train,
        ("Can you spell the word {t}?", 'Tell me how to spell "{t}".'),
        word,
        "-".join(word) + ".",
    )


def repeat(sampler: Sampler) -> Turn:
    """Names, codes, messages and invented words, as they are: practice in copying, which calls of tools need."""
    kinds: tuple[str, ...] = (
        "word",
        "word",
        "person",
        "place",
        "code",
        "message",
        "file",
        "street",
        "host",
        "email",
        "title",
    )
    if not sampler.heldout:
        kinds += (
            "code",
            "phone",
            "url",
            "product",
            "int 100 999999999",
            "number 0.1 9999",
            "position",
            "address",
        )
    text = ", ".join(draw(sampler, sampler.pick(kinds)).text for _ in range(sampler.rng.randint(1, 5)))
    train = (
        "Repeat: {t}",
        "Repeat exactly: {t}",
        "Repeat after me: {t}",
        "Copy this: {t}",
        "Say this again: {t}",
        "Write exactly this: {t}",
        'Repeat "{t}".',
        'Write "{t}" once more.',
    )
    return _task(sampler, train, ("Copy exactly: {t}", 'Say "{t}" again.'), text, text)


def look_up(sampler: Sampler) -> Turn:
    """One of a few invented names with their values: practice in finding what to copy."""
    kinds = ("word", "person", "place", "code", "file", "title", "phone", "int 10 99999", "number 0.1 999")
    found = {
        invented(sampler): draw(sampler, sampler.pick(kinds)).text for _ in range(sampler.rng.randint(2, 6))
    }
    key, value = sampler.pick(list(found.items()))
    form = sampler.pick(("{} is {}", "{} = {}", "{}: {}", "{} has {}"))
    pairs = sampler.pick((", ", "; ")).join(form.format(*pair) for pair in found.items())
    train = (
        "{pairs}. What is {key}?",
        "{pairs}. What does {key} stand for?",
        "Which value does {key} have here? {pairs}",
        "Look up {key}: {pairs}",
        "In this list, what belongs to {key}? {pairs}",
        "{pairs}. Give me the value of {key}.",
    )
    heldout = ("{pairs}. Tell me {key}.", "Find {key} in this: {pairs}")
    fields = {"pairs": pairs, "key": key}
    return Turn(sampler.phrase(train, heldout, fields, exact=True), value)


_FROM_ENGLISH = tuple(
    {"e": row[0], "l": language, "f": row[i]}
    for row in TRANSLATIONS
    for i, language in enumerate(LANGUAGES, 1)
)
_MEANINGS: dict[str, set[tuple[str, str]]] = {}
for _row in _FROM_ENGLISH:
    _MEANINGS.setdefault(_row["f"].lower(), set()).add((_row["e"], _row["l"]))
TO = Kind(
    "translate",
    (
        'How do you say "{e}" in {l}?',
        "How do you say {e} in {l}?",
        'What is "{e}" in {l}?',
        'What\'s "{e}" in {l}?',
        'Translate "{e}" into {l}.',
        'Translate "{e}" to {l}.',
        "Translate into {l}: {e}",
        "Translate to {l}: {e}",
        'What is the {l} for "{e}"?',
        'What is the {l} word or phrase for "{e}"?',
        'Say "{e}" in {l}.',
        "{e} in {l}?",
        'Can you translate "{e}" into {l}?',
        'How would you say "{e}" in {l}?',
    ),
    (
        'Can you say "{e}" in {l}?',
        'Could you translate "{e}" to {l}?',
        'How is "{e}" said in {l}?',
        'Tell me how to say "{e}" in {l}.',
    ),
    '"{e}" in {l} is "{f}".',
    "f",
    _FROM_ENGLISH,
)
FROM = Kind(
    "meaning",
    (
        'What does "{f}" mean?',
        'What is the meaning of "{f}"?',
        'Translate "{f}" into English.',
        'Translate "{f}" to English.',
        "Translate into English: {f}",
        'What is "{f}" in English?',
        "What does {f} mean in English?",
        'What does the {l} "{f}" mean?',
        'How do you say "{f}" in English?',
    ),
    (
        'What is the English for "{f}"?',
        'Can you translate "{f}" into English?',
        'Tell me what "{f}" means.',
    ),
    '"{f}" is {l} for "{e}".',
    "e",
    tuple(row for row in _FROM_ENGLISH if len(_MEANINGS[row["f"].lower()]) == 1),
)


def translate(sampler: Sampler) -> Turn:
    """A translation from or, less often, into English."""
    return (TO if sampler.chance(0.7) else FROM).ask(sampler)


def all_languages(sampler: Sampler) -> Turn:
    """A phrase in all four languages."""
    row = sampler.pick(TRANSLATIONS)
    train = (
        'Translate "{e}" into Spanish, French, German and Italian.',
        'How do you say "{e}" in Spanish, French, German and Italian?',
        'Say "{e}" in four languages.',
        'Translate "{e}" into four languages.',
        'What is "{e}" in other languages?',
    )
    question = sampler.phrase(train, ('Tell me how to say "{e}" in four languages.',), {"e": row[0]})
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
