"""Tool calls: functions are offered, and the question needs one of them, two, or none.

Functions and parameters have other names in every dialogue, so what to call can only be read from the prompt.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..facts import Tool, tools
from .common import Message, Sampler, Turn, capitalized, phrasings
from .made_tools import made_tool
from .values import Value, draw, invented, object_schema, plain, schema

P = phrasings("tools")

Offered = dict[str, Any]
Call = dict[str, Any]
LONGEST = 3700  # characters of a dialogue as JSON, about 1,200 tokens
MADE = 0.6  # share of the tools of training that no table has
NO_TOOL = "Sorry, none of my tools can do that."


class Offer(NamedTuple):
    """A tool as a dialogue offers it: `keys` has the name of each parameter by its first one."""

    tool: Tool
    keys: dict[str, str]
    spec: Offered

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self.spec["function"]["name"])


class Request(NamedTuple):
    """A phrasing with its fields, the call that it asks for, and the tool's arguments by their first names."""

    phrasing: str
    fields: dict[str, str]
    call: Call
    arguments: dict[str, Any]


def styled(name: str, style: float) -> str:
    """A name in snake case, camel case or with hyphens."""
    first, *others = name.split("_")
    if style < 0.65:
        return name
    return first + "".join(map(capitalized, others)) if style < 0.9 else "-".join((first, *others))


def offer(sampler: Sampler, tool: Tool) -> Offer:
    """The tool with names of its own, in the form of OpenAI's API."""
    style = sampler.rng.random()
    name = sampler.pick(tool.names)
    if sampler.chance(0.15):
        name = f"{invented(sampler)}_{name}"
    parameters = list(tool.parameters)
    if sampler.chance(0.25):
        sampler.rng.shuffle(parameters)
    keys = {each.names[0]: styled(sampler.pick(each.names), style) for each in parameters}
    described = sampler.chance(0.5)
    properties = {
        keys[each.names[0]]: schema(each.kind)
        | ({"description": each.about} if described and each.about else {})
        for each in parameters
    }
    required = [keys[each.names[0]] for each in parameters if not each.optional]
    given = object_schema(properties, required)
    if sampler.chance(0.15):
        given["additionalProperties"] = False
    function: Offered = {"name": styled(name, style), "description": tool.about, "parameters": given}
    if sampler.chance(0.1):
        del function["description"]
    return Offer(tool, keys, {"type": "function", "function": function})


def request(sampler: Sampler, offered: Offer, order: bool = False) -> Request:
    """What needs the tool, as a question or, with `order`, only as what completes "Please ..."."""
    tool = offered.tool
    phrasings = tool.heldout if sampler.heldout else tool.train
    phrasing = sampler.pick([text for text in phrasings if not order or not text.endswith("?")])
    asked = phrasing.endswith("?")
    phrasing = phrasing.removesuffix("?")
    found: dict[str, Value] = {}
    for each in tool.parameters:
        if not each.optional or sampler.chance(0.4):
            found[each.names[0]] = draw(sampler, each.kind)
            phrasing += f" {each.clause}" if each.optional else ""
    arguments = {key: found[first].json for first, key in offered.keys.items() if first in found}
    return Request(
        phrasing + "?" * asked,
        {first: value.text for first, value in found.items()},
        {"name": offered.name, "arguments": arguments},
        {first: value.json for first, value in found.items()},
    )


def ask(sampler: Sampler, asked: Request) -> str:
    """One request as a question."""
    text = asked.phrasing
    if not text.endswith("?"):
        text = sampler.pick(P.frames[sampler.heldout]).replace("{x}", text)
    return sampler.phrase((text,), (text,), asked.fields, exact=True)


def ask_both(sampler: Sampler, first: Request, second: Request) -> str:
    """Two requests as one question."""
    frame = sampler.pick(P.twice[sampler.heldout])
    fields = {
        f"{key}{i}": text for i, each in enumerate((first, second)) for key, text in each.fields.items()
    }
    x, y = (each.phrasing.replace("}", f"{i}}}") for i, each in enumerate((first, second)))
    text = frame.replace("{x}", x).replace("{y}", y)
    return sampler.phrase((text,), (text,), fields, exact=True)


def called(calls: Sequence[Call], number: int) -> Message:
    """The assistant's message with calls; `number` is the first one's in its dialogue."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call_{i}", "type": "function", "function": call} for i, call in enumerate(calls, number)
        ],
    }


def result(sampler: Sampler, tool: Tool, arguments: dict[str, Any]) -> tuple[str, str]:
    """A result of the tool and a sentence about it."""
    if sampler.chance(0.08):
        error = sampler.pick(P.errors)
        return json.dumps({"error": error}), f"That did not work: {error}."
    values = {key: True if kind == "true" else draw(sampler, kind).json for key, kind in tool.results.items()}
    fields = {key: plain(value) for key, value in {**arguments, **values}.items()}
    return json.dumps(values, ensure_ascii=False), capitalized(tool.summary.format_map(fields))


def choose(sampler: Sampler, needed: Sequence[Tool] = ()) -> list[Offer]:
    """One to five tools in any order, the needed ones among them."""
    count = max(sampler.pick((1, 1, 2, 2, 3, 3, 4, 5)), len(needed))
    known = tools(False) + (tools(True) if sampler.heldout else ())
    others = [tool for tool in known if tool not in needed]
    chosen = [*needed, *sampler.rng.sample(others, count - len(needed))]
    if not sampler.heldout:
        chosen[len(needed) :] = [
            made_tool(sampler) if sampler.chance(MADE) else each for each in chosen[len(needed) :]
        ]
    sampler.rng.shuffle(chosen)
    return [offer(sampler, tool) for tool in chosen]


def some_tool(sampler: Sampler) -> Tool:
    """A tool to be called; every second one of a held-out dialogue is held out."""
    if not sampler.heldout and sampler.chance(MADE):
        return made_tool(sampler)
    return sampler.pick(tools(sampler.heldout and sampler.chance(0.5)))


def call_round(sampler: Sampler, offers: Sequence[Offer], number: int, results: bool) -> list[Message]:
    """A question that needs one or two calls, the calls and, if wanted, their results with a summary."""
    chosen = [sampler.pick(offers)]
    if sampler.chance(0.2):
        chosen.append(sampler.pick(offers))
    requests = [request(sampler, each, order=len(chosen) == 2) for each in chosen]
    question = ask(sampler, *requests) if len(chosen) == 1 else ask_both(sampler, *requests)
    messages = [{"role": "user", "content": question}, called([each.call for each in requests], number)]
    if results:
        found = [result(sampler, each.tool, r.arguments) for each, r in zip(chosen, requests, strict=True)]
        messages += [
            {"role": "tool", "tool_call_id": f"call_{i}", "content": text}
            for i, (text, _) in enumerate(found, number)
        ]
        messages.append({"role": "assistant", "content": " ".join(summary for _, summary in found)})
    return messages


def _words(sampler: Sampler, tool: Tool) -> list[str]:
    """A tool's names, for training in words: made tools may have one in common with what is asked for."""
    return list(tool.names) if sampler.heldout else [word for name in tool.names for word in name.split("_")]


def missing(sampler: Sampler, offers: Sequence[Offer]) -> Turn:
    """A request that needs a tool which is not offered."""
    there = {word for each in offers for word in _words(sampler, each.tool)}
    tool = some_tool(sampler)
    while there.intersection(_words(sampler, tool)):
        tool = some_tool(sampler)
    return Turn(ask(sampler, request(sampler, offer(sampler, tool))), NO_TOOL)


def dialogue(sampler: Sampler, usual: Callable[[Sampler], Turn]) -> tuple[list[Message], list[Offered]]:
    """The messages and the tools. One to three rounds: calls, a request without a tool for it, or a question that needs
    none, which `usual` asks and answers."""
    offers = choose(sampler, (some_tool(sampler),))
    messages: list[Message] = []
    rounds, calls = sampler.pick((1, 1, 1, 1, 2, 2, 3)), 0
    for left in reversed(range(rounds)):
        kind = sampler.rng.random()
        if kind < 0.7:
            found = call_round(sampler, offers, calls, left > 0 or sampler.chance(0.55))
            calls += len(found[1]["tool_calls"])
            messages += found
            continue
        turn = missing(sampler, offers) if kind < 0.82 else usual(sampler)
        messages += [
            {"role": "user", "content": turn.question},
            {"role": "assistant", "content": turn.answer},
        ]
    offered = [each.spec for each in offers]
    if len(json.dumps((messages, offered))) > LONGEST:
        return dialogue(sampler, usual)
    return messages, offered
