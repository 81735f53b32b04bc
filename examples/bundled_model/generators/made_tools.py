"""Functions that no table has, made of a verb, a noun and a few parameters. There are so many that names and parameters
can't be learned by heart: a model has to read them in the prompt."""

from ..facts import ANIMALS, CATEGORIES, Parameter, Tool, tools
from .common import Sampler, article, capitalized
from .values import invented

_VERBS = (
    *(
        "bake",
        "build",
        "check",
        "clean",
        "close",
        "collect",
        "cook",
        "copy",
        "count",
        "cut",
        "deliver",
        "draw",
    ),
    *(
        "fill",
        "film",
        "fix",
        "hide",
        "inspect",
        "lift",
        "load",
        "lock",
        "mark",
        "measure",
        "move",
        "open",
        "order",
    ),
    *(
        "pack",
        "paint",
        "park",
        "photograph",
        "polish",
        "print",
        "protect",
        "register",
        "rent",
        "replace",
        "reserve",
    ),
    *(
        "return",
        "ring",
        "scan",
        "sell",
        "ship",
        "show",
        "sort",
        "start",
        "stop",
        "store",
        "test",
        "track",
        "turn",
    ),
    *("update", "wash", "watch", "weigh", "wrap"),
)
_GROUPS = (
    "fruits",
    "vegetables",
    "musical instruments",
    "pieces of furniture",
    "pieces of clothing",
    "vehicles",
)
_NOUNS = (
    *(item for name in (*_GROUPS, "tools", "rooms", "trees", "flowers") for item in CATEGORIES[name]),
    *(animal.name for animal in ANIMALS),
    *(
        "account",
        "alarm",
        "battery",
        "box",
        "bridge",
        "camera",
        "card",
        "contract",
        "database",
        "door",
        "engine",
    ),
    *(
        "fence",
        "filter",
        "folder",
        "fountain",
        "gate",
        "heater",
        "invoice",
        "key",
        "lamp",
        "letter",
        "machine",
        "map",
    ),
    *(
        "market",
        "menu",
        "meter",
        "model",
        "network",
        "office",
        "page",
        "parcel",
        "phone",
        "picture",
        "pipe",
        "pool",
    ),
    *(
        "printer",
        "pump",
        "radio",
        "report",
        "robot",
        "roof",
        "room",
        "sample",
        "screen",
        "sensor",
        "shop",
        "sign",
    ),
    *("station", "tank", "ticket", "tower", "valve", "wall", "window"),
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


def made_tool(sampler: Sampler) -> Tool:
    """A function of one to four parameters, up to two of which are optional."""
    known = {name for tool in (*tools(False), *tools(True)) for name in tool.names}
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
