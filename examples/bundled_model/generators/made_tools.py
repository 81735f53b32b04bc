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
_CHOICES = (
    *(
        "cheap",
        "dear",
        "old",
        "new",
        "round",
        "square",
        "soft",
        "hard",
        "wet",
        "dry",
        "wide",
        "narrow",
        "plain",
    ),
    *(
        "summer",
        "winter",
        "north",
        "south",
        "gold",
        "silver",
        "steel",
        "stone",
        "glass",
        "paper",
        "cotton",
        "first",
    ),
)
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
    ("fast/quickly", "bool quickly/without hurry", "{fast}", "Whether it is urgent."),
    ("loud/aloud", "bool aloud/without a sound", "{loud}", "Whether it may be heard."),
    ("wrapped/paper", "bool wrapped in paper/without paper", "{wrapped}", "Whether paper is needed."),
    ("point/spot/position", "position", "to {point}", "Where on the map."),
    ("client/sender/receiver", "contact", "and ask {client}", "Name and phone number."),
    ("origin/start/from", "address", "from {origin}", "Street and city."),
    ("goal/end/deliver_to", "address", "to {goal}", "Street and city."),
    ("guests/friends/crew", "list person", "with {guests}", "Who comes."),
    ("tags/labels/keywords", "list word", "with the tags {tags}", "Some words."),
    ("litres/volume/quantity", "number 1 60", "of {litres} litres", "In litres."),
    ("weight/kilos", "int 2 4000", "of {weight} kilos", "In kilos."),
    ("metres/height/depth", "int 2 300", "at a height of {metres} metres", "In metres."),
    ("degrees/heat", "number 4 90", "at {degrees} degrees", "In degrees."),
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
        if sampler.chance(0.15):
            names, kind, clause, about = _choice(sampler, number)
        optional = number > 0 and sampler.chance(0.3)
        parameters.append(Parameter(tuple(names.split("/")), kind, clause, about, optional))
    clauses = [each.clause for each in parameters if not each.optional]
    if sampler.chance(0.4):
        sampler.rng.shuffle(clauses)
    if sampler.chance(0.2):  # only a part of the name is said
        name = (
            f"{sampler.pick(_VERBS)}_{name.split('_', 1)[1]}"
            if sampler.chance(0.5)
            else f"{name}_{invented(sampler)}"
        )
    phrasing = " ".join((f"{verb} the {noun}", *clauses))
    about = f"{capitalized(verb)} {article(noun)}." if sampler.chance(0.7) else f"{capitalized(verb)} things."
    result, summary = sampler.pick(
        (("job", "The number is {job}."), ("order_number", "It is order {order_number}."))
    )
    return Tool((name,), about, tuple(parameters), (phrasing,), (), {result: "code"}, summary)


def _choice(sampler: Sampler, number: int) -> tuple[str, str, str, str]:
    """A parameter that is one of a few words, which its JSON may write in another way."""
    words = sampler.rng.sample(_CHOICES, sampler.rng.randint(2, 5))
    if sampler.chance(0.4):
        words = [f"{word[: sampler.pick((1, 2, 3))]}{i}={word}" for i, word in enumerate(words)]
    key = f"{invented(sampler)}_{number}"
    text = sampler.pick((f"of the kind {{{key}}}", f"in {{{key}}}", f"as {{{key}}}"))
    return key, f"enum {'/'.join(words)}", text, "Which kind."
