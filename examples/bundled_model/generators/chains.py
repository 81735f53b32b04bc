"""Dialogues whose later questions refer to the earlier turns."""

from ..facts import LANGUAGES
from . import lists
from .arithmetic import Sum, ask, draw, is_held_out
from .common import Kind, Sampler, Turn
from .countries import BY_NAME, FOLLOW_UPS, ROWS
from .nature import ELEMENT_ROWS, GROUP, NUMBER, SOUND, STATE, SYMBOL, YOUNG
from .rewriting import TO, TRANSLATIONS
from .writing import PYTHON, TASK, TOPIC

_AND = (
    ("And {x}?", "What about {x}?", "And what about {x}?", "And for {x}?", "Now {x}."),
    ("And how about {x}?", "How about {x}?"),
)


def country(sampler: Sampler) -> list[Turn]:
    """Several facts of one country, then perhaps the last question for another country."""
    row = sampler.pick([row for row in ROWS if "-" not in row.values()])
    names = sampler.rng.sample(tuple(FOLLOW_UPS), sampler.rng.randint(2, 4))
    turns = [BY_NAME[names[0]].ask(sampler, row)]
    for name in names[1:]:
        turns.append(Turn(sampler.phrase(*FOLLOW_UPS[name]), BY_NAME[name].full(row)))
    while sampler.chance(0.4) and len(turns) < 6:
        other = sampler.pick([row for row in ROWS if "-" not in row.values()])
        turns.append(Turn(sampler.phrase(*_AND, {"x": other["c"]}), BY_NAME[names[-1]].full(other)))
    return turns


_FollowUps = tuple[tuple[Kind, tuple[tuple[str, ...], tuple[str, ...]]], ...]
_ELEMENT_FOLLOW_UPS: _FollowUps = (
    (
        SYMBOL,
        (
            ("And its symbol?", "What is its symbol?", "Which symbol does it have?"),
            ("And what is its symbol?",),
        ),
    ),
    (
        NUMBER,
        (
            ("And its atomic number?", "What is its atomic number?", "How many protons does it have?"),
            ("And what is its atomic number?",),
        ),
    ),
    (
        STATE,
        (
            (
                "Is it a solid, a liquid or a gas?",
                "In which state is it?",
                "And its state at room temperature?",
            ),
            ("What state is it in?",),
        ),
    ),
)
_ANIMAL_FOLLOW_UPS: _FollowUps = (
    (
        YOUNG,
        (
            ("And what is its young called?", "What are its young called?", "And its young?"),
            ("What is its young called?",),
        ),
    ),
    (
        GROUP,
        (
            ("What kind of animal is it?", "And what kind of animal is it?", "Which kind of animal is it?"),
            ("What type of animal is it?",),
        ),
    ),
    (
        SOUND,
        (
            ("What sound does it make?", "And which sound does it make?", "And its sound?"),
            ("And what sound does it make?",),
        ),
    ),
)


def thing(sampler: Sampler) -> list[Turn]:
    """Several facts of one element or animal."""
    element = sampler.chance(0.6)
    follow_ups = _ELEMENT_FOLLOW_UPS if element else _ANIMAL_FOLLOW_UPS
    row = sampler.pick(ELEMENT_ROWS if element else SOUND.rows)
    (first, _), *rest = sampler.rng.sample(follow_ups, sampler.rng.randint(2, 3))
    turns = [first.ask(sampler, row)]
    turns += [Turn(sampler.phrase(*phrasings), kind.full(row)) for kind, phrasings in rest]
    if sampler.chance(0.3):
        last = rest[-1][0]
        other = sampler.pick(last.rows)
        turns.append(Turn(sampler.phrase(*_AND, {"x": other.get("a", other["name"])}), last.full(other)))
    return turns


_CONTINUED = {
    "+": (
        ("Add {b} to that.", "Now add {b}.", "Plus {b}?", "And plus {b}?", "Add {b} to the result."),
        ("Then add {b}.", "Now add {b} to it."),
    ),
    "-": (
        ("Subtract {b} from that.", "Now subtract {b}.", "Minus {b}?", "And minus {b}?", "Take away {b}."),
        ("Then subtract {b}.", "Now take away {b}."),
    ),
    "*": (
        ("Multiply that by {b}.", "Now multiply by {b}.", "Times {b}?", "And times {b}?"),
        ("Then multiply it by {b}.",),
    ),
}


def _next_sum(sampler: Sampler, start: int) -> Sum:
    for _ in range(1000):
        sign = sampler.pick("++--*") if start < 100 else sampler.pick("+-")
        b = sampler.rng.randint(2, 9 if sign == "*" else sampler.pick((10, 99)))
        if not is_held_out(start, sign, b) and (sign != "-" or b <= start):
            return Sum(start, sign, b)
    return Sum(start, "+", 0)


def sums(sampler: Sampler) -> list[Turn]:
    """Sums that continue with the last result, or separate ones."""
    if sampler.chance(0.4):
        return [ask(sampler) for _ in range(sampler.rng.randint(2, 6))]
    item = draw(sampler, sampler.pick("+-"))
    turns = [ask(sampler, item)]
    for _ in range(sampler.rng.randint(1, 4)):
        item = _next_sum(sampler, item.result) if item.result >= 0 else Sum(item.result, "+", 0)
        if item.b == 0:
            break
        turns.append(Turn(sampler.phrase(*_CONTINUED[item.sign], {"b": str(item.b)}), f"{item}."))
    return turns


def translation(sampler: Sampler) -> list[Turn]:
    """A phrase in one language after the other, or several phrases in one language."""
    phrases, languages = sampler.rng.sample(TRANSLATIONS, 4), sampler.rng.sample(LANGUAGES, 4)
    rows = {(row["e"], row["l"]): row for row in TO.rows}
    first = rows[phrases[0][0], languages[0]]
    turns = [TO.ask(sampler, first)]
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    n = sampler.rng.randint(1, 3)
    if sampler.chance(0.6):
        train, held_out = (
            ("Now in {l}.", "And in {l}?", "In {l}?", "What about {l}?", "And {l}?"),
            ("And how do you say it in {l}?", "Now say it in {l}."),
        )
        chosen = [rows[phrases[0][0], language] for language in languages[1 : n + 1]]
    else:
        train, held_out = (
            ('And "{e}"?', 'What about "{e}"?', "And {e}?", 'Now "{e}".'),
            ('And how about "{e}"?',),
        )
        chosen = [rows[phrase[0], languages[0]] for phrase in phrases[1 : n + 1]]
    return turns + [Turn(sampler.phrase(train, held_out, row), TO.full(row)) for row in chosen]


_EDITS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sort": (
        ("Sort them alphabetically.", "Now sort them.", "Put them in alphabetical order.", "Sort the list."),
        ("Can you sort them alphabetically?", "Now sort the list alphabetically."),
    ),
    "upper": (
        (
            "Now in uppercase.",
            "Write them in uppercase.",
            "Put them in capital letters.",
            "In uppercase, please.",
        ),
        ("Write the list in uppercase.", "Now put them in uppercase."),
    ),
    "reverse": (
        (
            "Now in reverse order.",
            "Reverse the list.",
            "Put them in reverse order.",
            "Turn the order around.",
        ),
        ("Now reverse the list.", "Write them in reverse order."),
    ),
    "bullets": (
        (
            "As bullet points, please.",
            "Now as bullet points.",
            "Use bullet points.",
            "Write them as bullet points.",
        ),
        ("Use bullet points instead.", "Can you write them as bullet points?"),
    ),
}


def list_edits(sampler: Sampler) -> list[Turn]:
    """A list, then the same list sorted, in uppercase or in another form."""
    what = sampler.pick(tuple(lists.NAMES))
    items = sampler.neighbours(lists.NAMES[what], sampler.rng.randint(3, min(6, len(lists.NAMES[what]))))
    fields = {"n": lists.number(sampler, len(items)), "what": what}
    turns = [Turn(sampler.phrase(lists.NUMBERED, lists.NUMBERED_HELD_OUT, fields), lists.numbered(items))]
    edits = sampler.rng.sample(tuple(_EDITS), sampler.rng.randint(1, 2))
    for edit in edits:
        if edit == "sort":
            items = sorted(items, key=str.lower)
        elif edit == "reverse":
            items = items[::-1]
        shown = [item.upper() for item in items] if edit == "upper" else items
        answer = lists.bulleted(shown) if edit == "bullets" else lists.numbered(shown)
        turns.append(Turn(sampler.phrase(*_EDITS[edit]), answer))
    return turns


def capitals(sampler: Sampler) -> list[Turn]:
    """Countries first, then their capitals, or single questions about the list."""
    what = sampler.pick([name for name in lists.NAMES if name.startswith("countries")])
    items = sampler.neighbours(lists.NAMES[what], sampler.rng.randint(2, 6))
    fields = {"n": lists.number(sampler, len(items)), "what": what}
    turns = [Turn(sampler.phrase(lists.NUMBERED, lists.NUMBERED_HELD_OUT, fields), lists.numbered(items))]
    train, held_out = (
        (
            "What are their capitals?",
            "And their capitals?",
            "Now add the capitals.",
            "Add their capitals.",
            "List their capitals.",
        ),
        ("What are the capitals of these countries?", "Now add their capitals."),
    )
    answer = lists.numbered([f"{item}: {lists.CAPITALS[item]}" for item in items])
    return [*turns, Turn(sampler.phrase(train, held_out), answer)]


def explanations(sampler: Sampler) -> list[Turn]:
    """Several explanations, the later ones asked for briefly."""
    kind = sampler.pick((TOPIC, TOPIC, PYTHON, TASK))
    rows = sampler.rng.sample(kind.rows, sampler.rng.randint(2, 3))
    turns = [kind.ask(sampler, rows[0])]
    if kind is TASK:
        train, held_out = (
            ("Now one that {x}.", "And one that {x}.", "Now write one that {x}.", "And a function that {x}?"),
            ("Next, one that {x}.", "Now write a function that {x}."),
        )
        return turns + [Turn(sampler.phrase(train, held_out, row), kind.full(row)) for row in rows[1:]]
    return turns + [Turn(sampler.phrase(*_AND, row), kind.full(row)) for row in rows[1:]]


CHAINS = (
    country,
    country,
    country,
    thing,
    thing,
    sums,
    sums,
    sums,
    translation,
    translation,
    list_edits,
    capitals,
    explanations,
)


def ask_any(sampler: Sampler) -> list[Turn]:
    """A chain of any kind."""
    return sampler.pick(CHAINS)(sampler)
