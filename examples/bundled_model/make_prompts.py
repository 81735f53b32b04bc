"""Makes `prompts.jsonl`: 50 dialogues in held-out phrasings and 50 code prefixes from held-out modules.

python -m examples.bundled_model.make_prompts
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from .generators import arithmetic, chains, lists, writing
from .generators.common import Message, Sampler, Turn
from .make_data import write_lines
from .stdlib_text import Module, modules

PROMPTS = Path(__file__).with_name("prompts.jsonl")
SHORTEST, LONGEST = 230, 640
LINES_AFTER = 8


def python_task(sampler: Sampler) -> Turn:
    """A function to write."""
    return writing.TASK.ask(sampler)


def one_turn(make: Callable[[Sampler], Turn], sampler: Sampler) -> list[Turn]:
    """A dialogue of a single turn."""
    return [make(sampler)]


SINGLE: tuple[tuple[Callable[[Sampler], Turn], int], ...] = (
    (lists.pairs, 8),
    (lists.table, 4),
    (writing.tale, 6),
    (writing.letter, 4),
    (writing.two_topics, 4),
    (writing.compare_countries, 4),
    (python_task, 6),
    (arithmetic.steps, 2),
    (arithmetic.sheet, 2),
    (arithmetic.times_table, 2),
    (writing.country_paragraph, 2),
)
CHAINS: tuple[Callable[[Sampler], list[Turn]], ...] = (
    *(chains.country, chains.capitals, chains.list_edits),
    *(chains.explanations, chains.sums, chains.translation),
)


def open_dialogue(turns: list[Turn]) -> list[Message]:
    """The turns without the last answer."""
    messages: list[Message] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages[:-1]


def dialogue_prompts() -> list[dict[str, list[Message]]]:
    """One prompt for every entry of the tables above, all different."""
    sampler = Sampler("prompts", heldout=True)
    sources: list[Callable[[], list[Turn]]] = [
        partial(one_turn, make, sampler) for make, count in SINGLE for _ in range(count)
    ]
    sources += [partial(make, sampler) for make in CHAINS]
    seen: set[str] = set()
    prompts = []
    for source in sources:
        turns = source()
        while turns[0].question in seen:
            turns = source()
        seen.add(turns[0].question)
        prompts.append({"messages": open_dialogue(turns)})
    return prompts


def code_prefixes(module: Module, sampler: Sampler) -> Iterator[str]:
    """Prefixes that start at a definition of the module and end at a line end where its body goes on."""
    lines = module.text.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if line.startswith(("def ", "class ", "async def "))]
    sampler.rng.shuffle(starts)
    for start in starts:
        end = next((i for i in range(start + 1, len(lines)) if lines[i][:1] not in " \n#)"), len(lines))
        cuts = [
            i
            for i in range(start + 1, end - LINES_AFTER)
            if SHORTEST <= len("".join(lines[start:i])) <= LONGEST
            and lines[i].strip()
            and lines[i - 1].strip()
        ]
        if cuts:
            yield "".join(lines[start : sampler.pick(cuts)])


def all_code_prompts() -> Iterator[dict[str, str]]:
    """Prefixes from the held-out modules in turn, as many as the running Python's library has."""
    sampler = Sampler("code prompts")
    sources = [code_prefixes(module, sampler) for module in modules() if module.held_out]
    while found := [prefix for source in sources if (prefix := next(source, None))]:
        yield from ({"prompt": prefix} for prefix in found)


def code_prompts(count: int = 50) -> list[dict[str, str]]:
    """The first of them. Raises ValueError if there are fewer."""
    prompts = list(islice(all_code_prompts(), count))
    if len(prompts) < count:
        raise ValueError(f"the held-out modules give only {len(prompts)} prompts")
    return prompts


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    write_lines(PROMPTS, [*dialogue_prompts(), *code_prompts()])


if __name__ == "__main__":
    main()
