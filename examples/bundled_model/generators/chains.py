"""Dialogues whose later questions refer to the earlier turns."""

from ..facts import LANGUAGES
from . import lists
from .arithmetic import Sum, ask, draw, is_held_out
from .common import Sampler, Turn, phrasings
from .countries import BY_NAME, ROWS
from .nature import ELEMENT_ROWS, GROUP, NUMBER, SOUND, STATE, SYMBOL, YOUNG
from .rewriting import TO, TRANSLATIONS
from .writing import PYTHON, TASK, TOPIC

P = phrasings("chains")


def country(sampler: Sampler) -> list[Turn]:
    """Several facts of one country, then perhaps the last question for another country."""
    row = sampler.pick([row for row in ROWS if "-" not in row.values()])
    names = sampler.rng.sample(tuple(P.country), sampler.rng.randint(2, 4))
    turns = [BY_NAME[names[0]].ask(sampler, row)]
    for name in names[1:]:
        turns.append(Turn(sampler.phrase(*P.country[name]), BY_NAME[name].full(row)))
    while sampler.chance(0.4) and len(turns) < 6:
        other = sampler.pick([row for row in ROWS if "-" not in row.values()])
        turns.append(Turn(sampler.phrase(*P.what_about, {"x": other["c"]}), BY_NAME[names[-1]].full(other)))
    return turns


def thing(sampler: Sampler) -> list[Turn]:
    """Several facts of one element or animal."""
    element = sampler.chance(0.6)
    kinds = (SYMBOL, NUMBER, STATE) if element else (YOUNG, GROUP, SOUND)
    row = sampler.pick(ELEMENT_ROWS if element else SOUND.rows)
    first, *rest = sampler.rng.sample(kinds, sampler.rng.randint(2, 3))
    turns = [first.ask(sampler, row)]
    turns += [Turn(sampler.phrase(*P.thing[kind.name]), kind.full(row)) for kind in rest]
    if sampler.chance(0.3):
        last = rest[-1]
        other = sampler.pick(last.rows)
        turns.append(
            Turn(sampler.phrase(*P.what_about, {"x": other.get("a", other["name"])}), last.full(other))
        )
    return turns


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
        turns.append(Turn(sampler.phrase(*P.continued[item.sign], {"b": str(item.b)}), f"{item}."))
    return turns


def translation(sampler: Sampler) -> list[Turn]:
    """A phrase in one language after the other, or several phrases in one language."""
    phrases, languages = sampler.rng.sample(TRANSLATIONS, 4), sampler.rng.sample(LANGUAGES, 4)
    rows = {(row["e"], row["l"]): row for row in TO.rows}
    first = rows[phrases[0][0], languages[0]]
    turns = [TO.ask(sampler, first)]
    n = sampler.rng.randint(1, 3)
    if sampler.chance(0.6):
        phrasing = P.same_phrase
        chosen = [rows[phrases[0][0], language] for language in languages[1 : n + 1]]
    else:
        phrasing = P.same_language
        chosen = [rows[phrase[0], languages[0]] for phrase in phrases[1 : n + 1]]
    return turns + [Turn(sampler.phrase(*phrasing, row), TO.full(row)) for row in chosen]


def list_edits(sampler: Sampler) -> list[Turn]:
    """A list, then the same list sorted, in uppercase or in another form."""
    what = sampler.pick(tuple(lists.NAMES))
    items = sampler.neighbours(lists.NAMES[what], sampler.rng.randint(3, min(6, len(lists.NAMES[what]))))
    fields = {"n": lists.number(sampler, len(items)), "what": what}
    turns = [Turn(sampler.phrase(*lists.P.numbered, fields), lists.numbered(items))]
    edits = sampler.rng.sample(tuple(P.edits), sampler.rng.randint(1, 2))
    for edit in edits:
        if edit == "sort":
            items = sorted(items, key=str.lower)
        elif edit == "reverse":
            items = items[::-1]
        shown = [item.upper() for item in items] if edit == "upper" else items
        answer = lists.bulleted(shown) if edit == "bullets" else lists.numbered(shown)
        turns.append(Turn(sampler.phrase(*P.edits[edit]), answer))
    return turns


def capitals(sampler: Sampler) -> list[Turn]:
    """Countries first, then their capitals, or single questions about the list."""
    what = sampler.pick([name for name in lists.NAMES if name.startswith("countries")])
    items = sampler.neighbours(lists.NAMES[what], sampler.rng.randint(2, 6))
    fields = {"n": lists.number(sampler, len(items)), "what": what}
    turns = [Turn(sampler.phrase(*lists.P.numbered, fields), lists.numbered(items))]
    answer = lists.numbered([f"{item}: {lists.CAPITALS[item]}" for item in items])
    return [*turns, Turn(sampler.phrase(*P.capitals), answer)]


def explanations(sampler: Sampler) -> list[Turn]:
    """Several explanations, the later ones asked for briefly."""
    kind = sampler.pick((TOPIC, TOPIC, PYTHON, TASK))
    rows = sampler.rng.sample(kind.rows, sampler.rng.randint(2, 3))
    turns = [kind.ask(sampler, rows[0])]
    if kind is TASK:
        return turns + [Turn(sampler.phrase(*P.next_task, row), kind.full(row)) for row in rows[1:]]
    return turns + [Turn(sampler.phrase(*P.what_about, row), kind.full(row)) for row in rows[1:]]


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
