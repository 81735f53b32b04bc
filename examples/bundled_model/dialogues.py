"""Dialogues from the tables of facts: the mix of generators, system messages, and the held-out part.

A dialogue depends on its seed string alone, so any number of processes makes the same data.
"""

from collections.abc import Iterator

from .generators import arithmetic, chains, countries, culture, lists, nature, rewriting, writing
from .generators.common import Message, Sampler, Turn

Dialogue = dict[str, list[Message]]
CHUNK = 1000
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


def dialogue(sampler: Sampler) -> Dialogue:
    """A chain or one to four unrelated turns, with a system message in a quarter of the cases."""
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


def chunk(seed: int, index: int, size: int = CHUNK, *, heldout: bool = False) -> list[Dialogue]:
    """The dialogues of one chunk; the training and the held-out part never share a seed."""
    part = "heldout" if heldout else "train"
    return [dialogue(Sampler(f"{part}-{seed}-{index}-{i}", heldout)) for i in range(size)]


def dialogues(count: int, seed: int = 0, *, heldout: bool = False) -> Iterator[Dialogue]:
    """`count` dialogues in order."""
    for index in range(0, count, CHUNK):
        yield from chunk(seed, index // CHUNK, min(CHUNK, count - index), heldout=heldout)
