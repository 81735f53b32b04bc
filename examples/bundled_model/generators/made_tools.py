"""Functions made of a verb, a noun and a few parameters. There are so many that names and parameters can't be learned
by heart: a model has to read them in the prompt."""

from functools import cache

from ..facts import ANIMALS, CATEGORIES, Parameter, Tool, rows, tools
from .common import Sampler, article, capitalized, phrasings
from .values import invented

P = phrasings("made_tools")

_VERBS = tuple(verb for (verb,) in rows("tool_verbs"))
_NOUNS = (
    *(item for name in P.groups for item in CATEGORIES[name]),
    *(animal.name for animal in ANIMALS),
    *(noun for (noun,) in rows("tool_nouns")),
)


@cache
def _known() -> frozenset[str]:
    return frozenset(name for tool in (*tools(False), *tools(True)) for name in tool.names)


def _same(sampler: Sampler, word: str) -> str:
    """The word, or in a third of the cases another one for it."""
    groups = [group.split() for group in P.same if word in group.split()]
    return sampler.pick(sampler.pick(groups)) if groups and sampler.chance(0.4) else word


def _noun(sampler: Sampler) -> str:
    return invented(sampler) if sampler.chance(0.25) else sampler.pick(_NOUNS)


def _measured(sampler: Sampler) -> tuple[str, str, str, str]:
    unit, measure = sampler.pick(P.units), sampler.pick(P.measures)
    low = sampler.pick((1, 2, 3, 5, 10, 20, 100, 200, 500))
    high = low * sampler.pick((20, 30, 50, 80)) + sampler.rng.randint(10, 99)
    kind = f"int {low} {high}" if sampler.chance(0.6) else f"number {low / 10} {high}"
    clause = sampler.pick(P.measured_clauses)
    clause = clause.replace("NAME", unit).replace("UNIT", unit).replace("MEASURE", measure)
    return f"{unit}/{measure}", kind, clause, f"{capitalized(measure)} in {unit}."


def _labelled(sampler: Sampler) -> tuple[str, str, str, str]:
    noun = _noun(sampler).replace(" ", "_")
    clause = sampler.pick(P.labelled_clauses)
    clause = clause.replace("NOUN", noun.replace("_", " ")).replace("NAME", noun)
    names = sampler.pick((noun, f"{noun}/{noun}_value", f"{noun}/the_{noun}"))
    return names, sampler.pick(P.labelled_kinds), clause, f"The {noun.replace('_', ' ')}."


def _option(sampler: Sampler) -> str:
    word = _noun(sampler)
    return capitalized(word) if sampler.chance(0.2) else word


def _chosen(sampler: Sampler) -> tuple[str, str, str, str]:
    name = sampler.pick(P.choices) if sampler.chance(0.7) else invented(sampler)
    texts = list(dict.fromkeys(_option(sampler) for _ in range(sampler.rng.randint(2, 5))))
    form = sampler.rng.random()
    keys = texts
    if form < 0.35:
        length = sampler.rng.randint(2, 3)
        keys = [text[:length].lower() if form < 0.25 else text[:length].upper() for text in texts]
    if (
        len(set(keys)) < 2
        or len(set(keys)) < len(texts)
        or len({text.lower() for text in texts}) < len(texts)
    ):
        return _chosen(sampler)
    kind = "enum " + "/".join(f"{key}={text}" for key, text in zip(keys, texts, strict=True))
    return name, kind, sampler.pick(P.chosen_clauses).replace("NAME", name), f"The {name}."


def _whether(sampler: Sampler) -> tuple[str, str, str, str]:
    if sampler.chance(0.5):
        noun = sampler.pick(_NOUNS).replace(" ", "_")
        text = noun.replace("_", " ")
        kind, names = f"bool with {article(text)}/without {article(text)}", f"{noun}/with_{noun}/use_{noun}"
        return names, kind, f"{{{noun}}}", f"Whether {article(text)} is used."
    pair = sampler.rng.sample(sampler.pick(P.opposites).split(), 2)
    about = f"{capitalized(pair[0])} or {pair[1]}."
    return pair[0], "bool " + "/".join(pair), f"{{{pair[0]}}}", about


def _record(sampler: Sampler) -> tuple[str, str, str, str]:
    keys = list(dict.fromkeys(_noun(sampler).split()[-1] for _ in range(sampler.rng.randint(2, 3))))
    name = sampler.pick(("details", "data", "options", "settings", "features", invented(sampler)))
    kind = "record " + "; ".join(f"{key}={sampler.pick(P.record_kinds)}" for key in keys)
    return name, kind, f"with {{{name}}}", f"The {name}."


def _parameters(sampler: Sampler) -> list[Parameter]:
    """One to four, with names of their own."""
    makers = (*[_measured] * 3, *[_labelled] * 3, *[_chosen] * 4, *[_whether] * 3, _record)
    found: list[Parameter] = []
    used: set[str] = set()
    count = sampler.pick((1, 2, 2, 3, 3, 4))
    while len(found) < count:
        fixed = sampler.chance(0.5)
        given, kind, clause, about = sampler.pick(P.parameters) if fixed else sampler.pick(makers)(sampler)
        names = given.split("/")
        if used.isdisjoint(names):
            used.update(names)
            found.append(Parameter(tuple(names), kind, clause, about, bool(found) and sampler.chance(0.3)))
    return found


def _core(noun: str, parameter: Parameter) -> str:
    """The noun with a parameter, or "" where they don't go together."""
    name = parameter.names[0]
    if name in P.units:
        return f"{{{name}}} {name} of {noun}"
    if name in P.choices and parameter.kind.startswith("enum"):
        return f"the {{{name}}} {noun}"
    return P.cores.get(name, "").replace("NOUN", noun)


def _phrasing(sampler: Sampler, start: str, noun: str, required: list[Parameter]) -> str:
    """The start, the noun, and the clauses in any order, one of them perhaps with the noun."""
    clauses = sampler.rng.sample(required, len(required))
    core = _core(noun, clauses[0]) if sampler.chance(0.5) else ""
    rest = clauses[1:] if core else clauses
    return " ".join((start, core or f"the {noun}", *(each.clause for each in rest)))


def made_tool(sampler: Sampler) -> Tool:
    """A function of one to four parameters, up to two of which are optional. Its name and description share words with
    its phrasings, not always all of them."""
    noun = _noun(sampler)
    if sampler.chance(0.3):
        noun = f"{_noun(sampler)} {noun}"
    moment = sampler.chance(0.25)
    measure = sampler.pick(P.moments if moment else P.measures) if sampler.chance(0.3) else ""
    verb = sampler.pick(P.asking if measure else _VERBS)
    named, told = _same(sampler, verb), _same(sampler, verb)
    words = noun.split()[-1:] if sampler.chance(0.3) else noun.split()
    words += [measure] if measure else []
    name = "_".join(sampler.pick(((named, *words), (named, *words), (*words, named), words)))
    if sampler.chance(0.1):
        name = f"{name}_{invented(sampler)}"
    if any(other in name for other in _known()):
        return made_tool(sampler)
    parameters = _parameters(sampler)
    required = [each for each in parameters if not each.optional]
    of = f"the {measure} of " if measure else ""
    starts = [f"{_same(sampler, verb)} {of}".strip() for _ in range(2)]
    starts += [f"{'When' if moment else 'What'} is {of}".strip()] * 2 if measure else []
    phrasings = [_phrasing(sampler, start.replace("_", " "), noun, required) for start in starts]
    phrasings = [text + "?" * text.startswith(("What", "When")) for text in phrasings]
    about = f"{told} {of}{article(noun)}." if sampler.chance(0.75) else f"{told} {of or 'things'}".rstrip()
    about = capitalized(about.replace("_", " ").removesuffix(" of").removesuffix(".")) + "."
    result, summary = sampler.pick(
        (("job", "The number is {job}."), ("order_number", "It is order {order_number}."))
    )
    results = {result: "code"}
    if measure:
        results, summary = (
            {measure: "time" if moment else "number 1 900"},
            f"The {measure} is {'at ' * moment}{{{measure}}}.",
        )
    return Tool((name,), about, tuple(parameters), tuple(phrasings), (), results, summary)
