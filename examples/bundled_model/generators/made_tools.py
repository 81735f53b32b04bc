"""Functions made of a verb, a noun and a few parameters. There are so many that names and parameters can't be learned
by heart: a model has to read them in the prompt."""

from functools import cache

from ..facts import ANIMALS, CATEGORIES, Parameter, Tool, rows, tools
from .common import Sampler, article, capitalized
from .values import invented

_VERBS = tuple(verb for (verb,) in rows("tool_verbs"))
_GROUPS = (
    *("fruits", "vegetables", "musical instruments", "pieces of furniture", "pieces of clothing"),
    *("vehicles", "tools", "rooms", "trees", "flowers"),
)
_NOUNS = (
    *(item for name in _GROUPS for item in CATEGORIES[name]),
    *(animal.name for animal in ANIMALS),
    *(noun for (noun,) in rows("tool_nouns")),
)
# Names, kind, clause, meaning.
_PARAMETERS = (
    ("colour/color/shade", "enum red/green/blue/black/white", "in {colour}", "The colour."),
    ("size/format", "enum small/medium/large", "in size {size}", "How large."),
    ("city/place/location", "place", "in {city}", "The city."),
    ("date/day/when", "date", "on {date}", "ISO date."),
    ("time/at/hour", "time", "at {time}", "24-hour time."),
    ("person/name/customer", "person", "for {person}", "For whom."),
    ("times/count/number", "int 2 40", "{times} times", "How often."),
    ("minutes/duration", "minutes", "within {minutes}", "Length in minutes."),
    ("note/text/message", "message", 'with the remark "{note}"', "A text."),
    ("code/id/reference", "code", "with the code {code}", "The number of the order."),
    ("price/budget/limit", "number 5 900", "for less than {price} euros", "In euros."),
    ("email/contact/address", "email", "and tell {email}", "An address."),
    ("file/path/target", "file", "as {file}", "Path of a file."),
    ("street/road", "street", "from {street}", "The street."),
    ("host/server/machine", "host", "on {host}", "Name of a computer."),
    ("items/parts", "list item", "together with {items}", "What else."),
    ("level/percent/share", "percent", "to {level}", "In percent."),
    ("label/tag/word", "word", "with the label {label}", "One word."),
    ("title/subject", "title", 'called "{title}"', "Its title."),
    ("careful/gentle", "bool carefully/at any rate", "{careful}", "Whether care is needed."),
)


@cache
def _known() -> frozenset[str]:
    return frozenset(name for tool in (*tools(False), *tools(True)) for name in tool.names)


def made_tool(sampler: Sampler) -> Tool:
    """A function of one to four parameters, up to two of which are optional."""
    known = _known()
    verb, noun = sampler.pick(_VERBS), sampler.pick(_NOUNS)
    if sampler.chance(0.3):
        noun = f"{sampler.pick(_NOUNS)} {noun}"
    name = "_".join((verb, *noun.split()) if sampler.chance(0.7) else (*noun.split(), verb))
    if sampler.chance(0.1):
        name = f"{name}_{invented(sampler)}"
    if any(other in name for other in known):
        return made_tool(sampler)
    parameters = []
    for number, (names, kind, clause, about) in enumerate(
        sampler.rng.sample(_PARAMETERS, sampler.pick((1, 2, 2, 3, 3, 4)))
    ):
        optional = number > 0 and sampler.chance(0.3)
        parameters.append(Parameter(tuple(names.split("/")), kind, clause, about, optional))
    phrasing = " ".join((f"{verb} the {noun}", *(each.clause for each in parameters if not each.optional)))
    about = f"{capitalized(verb)} {article(noun)}." if sampler.chance(0.7) else f"{capitalized(verb)} things."
    result, summary = sampler.pick(
        (("job", "The number is {job}."), ("order_number", "It is order {order_number}."))
    )
    return Tool((name,), about, tuple(parameters), (phrasing,), (), {result: "code"}, summary)
