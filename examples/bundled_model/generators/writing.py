"""Explanations, paragraphs and stories, Python answers, and small talk."""

from ..facts import COUNTRIES, PYTHON_FACTS, Country, python_tasks, rows
from .common import Kind, Sampler, Turn, article, capitalized
from .countries import ROWS as COUNTRY_ROWS
from .nature import ANIMAL_ROWS, ELEMENT_ROWS

_TOPICS = tuple({"x": topic, "text": text} for topic, text in rows("topics"))
_WHYS = tuple({"q": question, "x": clause, "text": text} for question, clause, text in rows("whys"))
TOPIC = Kind(
    "topic",
    (
        "What is {x}?",
        "What is {x}?",
        "What's {x}?",
        "Explain {x}.",
        "Explain what {x} is.",
        "Can you explain what {x} is?",
        "Could you explain what {x} is?",
        "Tell me what {x} is.",
        "Tell me about {x}.",
        "Describe {x}.",
        "Define {x}.",
        "Give me a short explanation of {x}.",
        "What does one mean by {x}?",
        "Do you know what {x} is?",
        "I want to know what {x} is.",
        "What exactly is {x}?",
    ),
    (
        "Can you tell me what {x} is?",
        "Please explain to me what {x} is.",
        "Explain briefly what {x} is.",
        "Give a short explanation of {x}.",
    ),
    "{text}",
    "text",
    tuple(row for row in _TOPICS if row["x"] != "supply and demand"),
)
WHY = Kind(
    "why",
    (
        "{q}",
        "{q}",
        "{q}",
        "Explain {x}.",
        "Can you explain {x}?",
        "Could you explain {x}?",
        "Tell me {x}.",
        "Do you know {x}?",
        "I want to know {x}.",
        "Can you tell me {x}?",
        "Explain to me {x}.",
    ),
    ("I would like to know {x}.", "Could you tell me {x}?"),
    "{text}",
    "text",
    _WHYS,
)
_KIND_NAMES = {"fn": "function", "kw": "keyword", "mod": "module", "type": "type"}
_PYTHON = tuple(
    {
        "x": fact.name,
        "kind": "method" if "." in fact.name and fact.kind == "fn" else _KIND_NAMES[fact.kind],
        "text": fact.text,
        "full": fact.text
        + (
            f" For example, {fact.example} returns {fact.result}."
            if fact.example not in ("-", 'print("hello")')
            else ""
        ),
    }
    for fact in PYTHON_FACTS
)
PYTHON = Kind(
    "python",
    (
        "What does {x} do in Python?",
        "What does {x} do?",
        "What does the {kind} {x} do in Python?",
        "What does the Python {kind} {x} do?",
        "Explain {x} in Python.",
        "Explain the Python {kind} {x}.",
        "What is {x} used for in Python?",
        "What is {x} for?",
        "Tell me about {x} in Python.",
        "What is {x} in Python?",
        "Describe the Python {kind} {x}.",
        "In Python, what does {x} do?",
    ),
    (
        "Can you explain what {x} does in Python?",
        "Tell me what {x} does in Python.",
        "What is the purpose of {x} in Python?",
    ),
    "{full}",
    "text",
    tuple(row for row in _PYTHON if row["kind"] != "type"),
)
PYTHON_TYPE = Kind(
    "python_type",
    (
        "What is {x} in Python?",
        "What's {x} in Python?",
        "Explain what {x} is in Python.",
        "In Python, what is {x}?",
        "What does one mean by {x} in Python?",
        "Tell me about {x} in Python.",
        "Can you explain what {x} is in Python?",
        "Describe {x} in Python.",
        "Define {x} in Python.",
    ),
    ("Tell me what {x} is in Python.", "Can you tell me what {x} is in Python?"),
    "{text}",
    "text",
    tuple(row for row in _PYTHON if row["kind"] == "type"),
)
_TASKS = tuple(
    {"x": task.task, "code": f"```python\n{task.code}\n```", "remark": task.remark} for task in python_tasks()
)
TASK = Kind(
    "task",
    (
        "Write a function that {x}.",
        "Write a Python function that {x}.",
        "Write a Python function which {x}.",
        "Can you write a function that {x}?",
        "Give me a function that {x}.",
        "Give me a Python function that {x}.",
        "Show me a Python function that {x}.",
        "I need a function that {x}.",
        "Implement a function that {x}.",
        "Write Python code for a function that {x}.",
        "In Python, write a function that {x}.",
        "How do I write a function that {x}?",
        "Create a function that {x}.",
    ),
    (
        "Could you write a Python function that {x}?",
        "I need a Python function that {x}.",
        "Please implement a Python function that {x}.",
        "Show me how to write a function that {x}.",
    ),
    "{code}\n\n{remark}",
    "code",
    _TASKS,
)
KINDS = (TOPIC, TOPIC, TOPIC, TOPIC, WHY, PYTHON, PYTHON, PYTHON, PYTHON_TYPE, TASK, TASK, TASK)


def country_text(country: Country) -> str:
    """A paragraph with all facts of a country."""
    fields = next(row for row in COUNTRY_ROWS if row["c"] == country.name)
    place = "" if country.continent == "-" else f" in {country.continent}"
    text = f"{capitalized(country.name)} is a country{place}. Its capital is {country.capital}."
    if country.language != "-":
        text += f" The {fields['spoken']} {country.language}."
    if country.currency != "-":
        text += f" The currency is the {country.currency}."
    return text


def country_paragraph(sampler: Sampler) -> Turn:
    """All facts of a country."""
    country = sampler.pick(COUNTRIES)
    train = (
        "Tell me about {c}.",
        "Write a short paragraph about {c}.",
        "Describe {c}.",
        "What do you know about {c}?",
        "Give me some facts about {c}.",
        "Write a few sentences about {c}.",
        "What can you tell me about {c}?",
        "Tell me something about {c}.",
    )
    held_out = (
        "Could you tell me about {c}?",
        "Give me a few facts about {c}.",
        "Write some sentences about {c}.",
    )
    return Turn(sampler.phrase(train, held_out, {"c": country.name}), country_text(country))


def compare_countries(sampler: Sampler) -> Turn:
    """The facts of two or three countries side by side."""
    n = 2 if sampler.chance(0.7) else 3
    countries = sampler.rng.sample(
        [c for c in COUNTRIES if "-" not in (c.continent, c.currency, c.language)], n
    )
    names = [c.name for c in countries]
    fields = {"c": ", ".join(names[:-1]) + " and " + names[-1]}
    lines = []
    for c in countries:
        lines += [f"{capitalized(c.name)}:", f"- Capital: {c.capital}", f"- Continent: {c.continent}"]
        lines += [f"- Language: {c.language}", f"- Currency: {c.currency}", ""]
    train = (
        "Compare {c}.",
        "Can you compare {c}?",
        "Give me the main facts about {c}.",
        "Make an overview of {c}.",
        "Show me a comparison of {c}.",
        "List the main facts about {c}.",
    )
    return Turn(
        sampler.phrase(train, ("Write a comparison of {c}.", "Please give me an overview of {c}."), fields),
        "\n".join(lines[:-1]),
    )


def thing_paragraph(sampler: Sampler) -> Turn:
    """All facts of an animal or an element."""
    if sampler.chance(0.5):
        row = sampler.pick(ANIMAL_ROWS)
        text = (
            f"{capitalized(row['a'])} is {row['a_group']}. A young {row['name']} is called {row['a_young']}."
        )
        if row["sound"] != "-":
            text += f" {capitalized(row['a'])} {row['sound']}."
        name = row["plural"]
    else:
        row = sampler.pick(ELEMENT_ROWS)
        text = f"{capitalized(row['name'])} is a chemical element with the symbol {row['symbol']} and the "
        text += f"atomic number {row['number']}. "
        text += f"It is {row['a_category']} and a {row['state']} at room temperature."
        name = "the element " + row["name"]
    train = (
        "Tell me about {x}.",
        "Write a short paragraph about {x}.",
        "Describe {x}.",
        "What do you know about {x}?",
        "Give me some facts about {x}.",
        "What can you tell me about {x}?",
        "Write a few sentences about {x}.",
    )
    return Turn(
        sampler.phrase(
            train, ("Could you tell me about {x}?", "Give me a few facts about {x}."), {"x": name}
        ),
        text,
    )


def two_topics(sampler: Sampler) -> Turn:
    """Two explanations in one answer."""
    first, second = sampler.rng.sample(TOPIC.rows, 2)
    train = (
        "Explain {a} and {b}.",
        "What is {a} and what is {b}?",
        "Tell me about {a} and {b}.",
        "Explain what {a} is and what {b} is.",
        "Describe {a} and {b}.",
        "Define {a} and {b}.",
    )
    held_out = ("Can you tell me what {a} and {b} are?", "Give me short explanations of {a} and {b}.")
    question = sampler.phrase(train, held_out, {"a": first["x"], "b": second["x"]})
    return Turn(question, f"{first['text']}\n\n{second['text']}")


_HEROES = (
    "fox",
    "rabbit",
    "mouse",
    "bear",
    "dog",
    "cat",
    "owl",
    "hedgehog",
    "squirrel",
    "frog",
    "duck",
    "wolf",
    "lion",
    "horse",
    "turtle",
    "otter",
)
_WHERE = (
    "in a quiet forest",
    "near a wide river",
    "on a small farm",
    "at the foot of a mountain",
    "by the sea",
    "in an old garden",
    "on a green hill",
)
_TRAITS = ("brave", "curious", "clever", "shy", "kind", "lazy", "patient", "proud")
_GOALS = (
    "find a golden key",
    "see the other side of the hill",
    "learn how to swim",
    "build a new house",
    "find the oldest tree",
    "win the great race",
    "catch the light of the moon",
)
_TROUBLES = (
    ("a heavy storm began", "looked for shelter under a large tree", "waited until the rain had stopped"),
    ("the path ended at a deep river", "looked for a way across", "built a small bridge of branches"),
    ("it became dark and cold", "made a warm bed of leaves", "slept until the morning came"),
    ("a large stone blocked the way", "pushed with all their strength", "rolled the stone aside together"),
    ("they lost the way", "asked an old bird for help", "followed the bird back to the path"),
)
_MORALS = (
    "good friends can solve any problem",
    "patience is worth more than speed",
    "it is wise to ask for help",
    "courage grows when it is shared",
    "home is the best place of all",
)


def tale(sampler: Sampler) -> Turn:
    """A short story about an animal and its friend."""
    hero, friend = sampler.rng.sample(_HEROES, 2)
    trouble, reaction, way_out = sampler.pick(_TROUBLES)
    text = (
        f"Once upon a time, there was {article(sampler.pick(_TRAITS))} {hero} "
        f"who lived {sampler.pick(_WHERE)}. "
        f"One day the {hero} wanted to {sampler.pick(_GOALS)}. "
        f"On the way the {hero} met {article(friend)}, and they decided to go together. "
        f"After a while {trouble}. The {hero} and the {friend} {reaction} and {way_out}. "
        f"In the evening they came home happy and tired. "
        f"Since that day they have known that {sampler.pick(_MORALS)}."
    )
    train = (
        "Tell me a story about {a}.",
        "Write a short story about {a}.",
        "Tell me a short story about {a}.",
        "Write a story about {a}.",
        "Can you tell me a story about {a}?",
        "I want to hear a story about {a}.",
        "Make up a story about {a}.",
        "Write a little story about {a}.",
    )
    held_out = (
        "Could you write a short story about {a}?",
        "Please make up a short story about {a}.",
        "I would like to read a story about {a}.",
    )
    return Turn(sampler.phrase(train, held_out, {"a": article(hero)}), text)


def letter(sampler: Sampler) -> Turn:
    """A short letter."""
    about, body = sampler.pick(rows("letters"))
    name = sampler.pick(
        ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ms Brown", "Mr Smith")
    )
    train = (
        "Write a letter to {n} about {x}.",
        "Write an email to {n} about {x}.",
        "Write a short letter to {n} about {x}.",
        "Write a short email to {n} about {x}.",
        "Can you write an email to {n} about {x}?",
        "Help me write an email to {n} about {x}.",
        "Draft an email to {n} about {x}.",
    )
    held_out = ("Could you write a short email to {n} about {x}?", "I need an email to {n} about {x}.")
    question = sampler.phrase(train, held_out, {"n": name, "x": about}, exact=True)
    return Turn(question, f"Dear {name},\n\n{body}\n\nKind regards")


_TALK = tuple((tuple(t.split("/")), tuple(h.split("/")), answer) for t, h, answer in rows("smalltalk"))


def small_talk(sampler: Sampler) -> Turn:
    """Greetings and questions about the assistant itself."""
    train, held_out, answer = sampler.pick(_TALK)
    return Turn(sampler.phrase(train, held_out), answer)


def explain(sampler: Sampler) -> Turn:
    """An explanation or a Python answer."""
    return sampler.pick(KINDS).ask(sampler)


def long_text(sampler: Sampler) -> Turn:
    """A longer answer."""
    forms = (
        country_paragraph,
        country_paragraph,
        compare_countries,
        thing_paragraph,
        two_topics,
        tale,
        tale,
        letter,
    )
    return sampler.pick(forms)(sampler)
