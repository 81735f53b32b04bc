"""Host time of constrained steps: reading the emitted tokens, finding forced text, and filling the masks of all nodes.

    python -m benchmarks.mask_time [--vocabulary 128000] [--threads 1]

No model runs: answers are given, and each step's tree is the chain of the next tokens, all of which are accepted. One
schema is plain; the other has lengths and patterns of strings, whose masks are the most expensive. The vocabulary is
the bundled model's plus the words of Python's library. A first pass fills llguidance's tables and is not counted.
"""

from __future__ import annotations

import argparse
import json
import re
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

from tokenizers import Tokenizer

from benchmarks.common import write_results
from specserve import SamplingParams
from specserve.config.paths import BUNDLED_MODEL
from specserve.engine.commands import Row
from specserve.engine.grammars import Grammars
from specserve.engine.masks import Masks
from specserve.grammar import json_schema
from specserve.speculation.state import RowInit

BATCHES = (1, 16, 64)
DRAFTED = 3
STEPS = 6
PASSES = 4
_TEXT: dict[str, Any] = {"type": "string"}
PLAIN = {"name": _TEXT, "age": {"type": "integer"}, "tags": {"type": "array", "items": _TEXT}, "city": _TEXT}
BOUNDED = {
    "name": {"type": "string", "maxLength": 20},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    "city": {"type": "string", "pattern": "^[A-Z][a-z ]{1,30}$"},
}
ANSWER = '{"name": "Ada Lovelace", "age": 36, "tags": ["red", "blue"], "city": "London by the river"}'
END = 1


class Written:
    """The nodes of a chain for each row, as in a step."""

    def __init__(self, chains: Sequence[Sequence[int]]) -> None:
        self._tokens = [token for chain in chains for token in chain]
        self._starts = [0]
        self._parents: list[int] = []
        for chain in chains:
            begin = self._starts[-1]
            self._parents += [max(begin, begin + index - 1) for index in range(len(chain))]
            self._starts.append(begin + len(chain))

    def read(self) -> tuple[list[int], list[int], list[int]]:
        return self._tokens, self._parents, self._starts


def tokenizer_of(size: int, folder: Path) -> Path:
    """The bundled tokenizer's file with words up to ``size`` tokens."""
    content = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    counts = Counter[str]()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        counts.update(re.findall(r" ?[A-Za-z]+", file.read_text(errors="ignore")))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    for word, _ in counts.most_common():
        for end in range(2, len(word) + 1):
            vocabulary.setdefault(word[:end].replace(" ", "Ġ"), len(vocabulary))
    for number in range(size):
        vocabulary.setdefault(f"Ġ{number}", len(vocabulary))
    content["model"]["vocab"] = {text: token for text, token in vocabulary.items() if token < size}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


def measure(
    grammars: Grammars,
    tokens: Sequence[int],
    properties: dict[str, Any],
    batch: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Microseconds of the parts of a step, and of its masks for each node."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    params = SamplingParams(grammar=json_schema(schema))
    for _ in range(batch):  # as each request does
        grammars.compile(params.grammar or "").result()
    size, spare = DRAFTED + 1, len(tokens) - (DRAFTED + 1) * (STEPS + 1)
    seconds: dict[str, list[float]] = {"told": [], "due": [], "masks": []}
    for number in range(1 + PASSES):
        masks = Masks(grammars)
        # Answers are at different places, as those of different requests are.
        places = [1 + slot % spare for slot in range(batch)]
        masks.admit([_admitted(slot, params, tokens[:place]) for slot, place in enumerate(places)])
        for step in range(STEPS):
            starts = [place + step * size for place in places]
            rows = [
                Row(slot, params, 1, tokens[start - size : start] if step else (), masked=True)
                for slot, start in enumerate(starts)
            ]
            chains = [tokens[start - 1 : start - 1 + size] for start in starts]
            begin = clock()
            masks.tell(rows)
            told = clock()
            masks.due(rows, DRAFTED)
            due = clock()
            masks.after_nodes(rows, Written(chains), pinned=False)  # type: ignore[arg-type]
            done = clock()
            assert not masks.take_failed()
            if number:
                for name, spent in (("told", told - begin), ("due", due - told), ("masks", done - due)):
                    seconds[name].append(spent * 1e6)
    found = {name: round(median(spent), 1) for name, spent in seconds.items()}
    return {**found, "masks a node": round(median(seconds["masks"]) / (batch * size), 1)}


def _admitted(slot: int, params: SamplingParams, output: Sequence[int]) -> RowInit:
    return RowInit(slot, [], params, 0, 0, [], output, 0, (), 0, 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    # One thread's time is that of the processor, which other programs disturb less.
    clock = process_time if args.threads == 1 else perf_counter
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        path = tokenizer_of(args.vocabulary, Path(folder))
        tokens = Tokenizer.from_file(str(path)).encode(ANSWER, add_special_tokens=False).ids
        grammars = Grammars(path, args.vocabulary, [END], args.threads)
        for name, properties in (("plain", PLAIN), ("bounded", BOUNDED)):
            for batch in BATCHES:
                figures.append(
                    {"schema": name, "batch": batch, **measure(grammars, tokens, properties, batch, clock)}
                )
                print(figures[-1], flush=True)
    print("written to", write_results("mask_time", {"threads": args.threads, "rows": figures}))


if __name__ == "__main__":
    main()
