"""Dialogues from the tables of facts: the mix of generators, system messages, and the held-out part.

A dialogue depends on its seed string alone, so any number of processes makes the same data.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from .generators import (
    arithmetic,
    chains,
    countries,
    culture,
    json_answers,
    lists,
    nature,
    rewriting,
    tools,
    writing,
)
from .generators.common import Message, Sampler, Turn

Dialogue = dict[str, Any]
"""`messages`, and `tools` if there are any."""
CHUNK = 1000


class Shares(NamedTuple):
    """Which shares of the dialogues offer tools and have answers in JSON."""

    tools: float = 0.22
    json: float = 0.10


SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful, friendly assistant.",
    "You are an assistant that answers questions.",
    "You are a polite assistant.",
    "You are a helpful AI assistant.",
    "Answer the questions of the user.",
    "You are a small language model bundled with specserve.",
    "You are a knowledgeable assistant. Answer correctly.",
    "Help the user with their questions.",
)
BRIEF = ("Answer as briefly as possible.", "Give only the answer.", "Answer in as few words as possible.")
FACT_KINDS = (
    *countries.KINDS,
    *countries.KINDS,
    *(kind for kind in nature.KINDS if kind is not nature.PLANET_KIND),
    *culture.KINDS,
)


def fact(sampler: Sampler) -> Turn:
    """A question about a fact."""
    return sampler.pick((*FACT_KINDS, nature.PLANET_KIND)).ask(sampler)


SINGLE = (
    *[fact] * 26,
    *[arithmetic.ask_any] * 27,
    *[lists.ask_any] * 11,
    *[rewriting.ask_any] * 8,
    *[rewriting.repeat] * 6,
    *[rewriting.look_up] * 5,
    *[rewriting.ask_translation] * 9,
    *[writing.explain] * 11,
    *[writing.long_text] * 10,
    *[writing.small_talk] * 2,
)


def brief(sampler: Sampler) -> list[Message]:
    """Facts under a system message that asks for short answers."""
    messages = [{"role": "system", "content": sampler.pick(BRIEF)}]
    for _ in range(sampler.rng.randint(1, 3)):
        kind = sampler.pick(FACT_KINDS)
        row = sampler.pick(kind.rows)
        messages.append({"role": "user", "content": kind.ask(sampler, row).question})
        messages.append({"role": "assistant", "content": kind.short(row)})
    return messages


def usual(sampler: Sampler) -> Turn:
    """A question of any kind without tools and JSON."""
    turn: Turn = sampler.pick(SINGLE)(sampler)
    return turn


def with_tools(sampler: Sampler) -> Dialogue:
    """A dialogue with tools, with a system message in a quarter of the cases."""
    messages, offered = tools.dialogue(sampler, usual)
    if sampler.chance(0.25):
        messages.insert(0, {"role": "system", "content": sampler.pick(SYSTEM_MESSAGES)})
    return {"messages": messages, "tools": offered}


def with_json(sampler: Sampler) -> Dialogue:
    """One or two questions with answers in JSON. What a system turn demands holds for one question only."""
    cases = [json_answers.ask_any(sampler)]
    if not cases[0].system and sampler.chance(0.25):
        cases += [case for case in (json_answers.ask_any(sampler),) if not case.system]
    system = cases[0].system or (sampler.pick(SYSTEM_MESSAGES) if sampler.chance(0.2) else "")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for case in cases:
        messages.append({"role": "user", "content": case.question})
        messages.append({"role": "assistant", "content": case.answer})
    return {"messages": messages}


def dialogue(sampler: Sampler, shares: Shares) -> Dialogue:
    """Tools, JSON, a chain, or one to four unrelated turns, with a system message in a quarter of the cases."""
    kind = sampler.rng.random()
    if kind < shares.tools:
        return with_tools(sampler)
    if kind < shares.tools + shares.json:
        return with_json(sampler)
    if sampler.chance(0.03):
        return {"messages": brief(sampler)}
    if sampler.chance(0.14):
        turns = chains.ask_any(sampler)
    else:
        turns = [sampler.pick(SINGLE)(sampler) for _ in range(sampler.pick((1, 1, 1, 1, 2, 2, 3, 4)))]
    messages: list[Message] = []
    if sampler.chance(0.25):
        messages.append({"role": "system", "content": sampler.pick(SYSTEM_MESSAGES)})
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    return {"messages": messages}


def chunk(index: int, seed: int, count: int, heldout: bool, shares: Shares) -> list[Dialogue]:
    """The dialogues of one chunk of `count`; the training and the held-out part never share a seed."""
    part = "heldout" if heldout else "train"
    size = min(CHUNK, count - index * CHUNK)
    return [dialogue(Sampler(f"{part}-{seed}-{index}-{i}", heldout), shares) for i in range(size)]


def dialogues(
    count: int, seed: int = 0, *, heldout: bool = False, shares: Shares = Shares(), processes: int = 1
) -> Iterator[Dialogue]:
    """`count` dialogues in order, which the number of processes does not change."""
    make = partial(chunk, seed=seed, count=count, heldout=heldout, shares=shares)
    chunks = range(-(-count // CHUNK))
    if processes == 1:
        for index in chunks:
            yield from make(index)
        return
    with ProcessPoolExecutor(processes) as pool:
        for made in pool.map(make, chunks):
            yield from made
