"""What constraints cost: on the device, on the host, and in accepted drafts."""

from __future__ import annotations

import argparse
import json
import re
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from tokenizers import Tokenizer

from benchmarks.common import (
    load_options,
    make_prompts,
    open_llm,
    parse_load,
    scheduler_of,
    shape_settings,
    tokens_per_step,
    weights_kept,
)
from benchmarks.constrained import PERSON, WEATHER, closed
from benchmarks.results import Figures, keep_rows, line, medians, options, run_command
from specserve import LLM, SamplingParams
from specserve.config.paths import BUNDLED_MODEL
from specserve.constraints.masks import Masks
from specserve.constraints.matcher import Grammars
from specserve.engine.commands import Row
from specserve.engine.runner import Runner
from specserve.grammar import json_schema
from specserve.models.read_config import load_model_config
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
SCHEMAS: dict[str, dict[str, Any]] = {"plain": PLAIN, "bounded": BOUNDED}
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
    params = SamplingParams(grammar=json_schema(closed(properties)))
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
            masks.consume(rows)
            told = clock()
            masks.forced(rows, DRAFTED)
            due = clock()
            masks.after_nodes(rows, Written(chains), pinned=False)  # type: ignore[arg-type]
            done = clock()
            assert not masks.take_failed()
            if number:
                for name, spent in (("told", told - begin), ("due", due - told), ("masks", done - due)):
                    seconds[name].append(spent * 1e6)
    microseconds = {name: round(median(spent), 1) for name, spent in seconds.items()}
    return {**microseconds, "masks a node": round(median(seconds["masks"]) / (batch * size), 1)}


def _admitted(slot: int, params: SamplingParams, output: Sequence[int]) -> RowInit:
    return RowInit(slot, [], params, 0, 0, [], output, 0, (), 0, 0, 0)


def mask_time() -> None:
    """Host time of constrained steps: reading the emitted tokens, finding forced text, and filling the masks of all
    nodes.

        python -m benchmarks.constrained_speed mask_time [--vocabulary 128000] [--threads 1]

    No model runs: answers are given, and each step's tree is the chain of the next tokens, all of which are
    accepted. One schema is plain; the other has lengths and patterns of strings, whose masks are the most
    expensive. The vocabulary is the bundled model's plus the words of Python's library. A first pass fills
    llguidance's tables and is not counted.
    """
    parser = options(mask_time.__doc__)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    # One thread's time is that of the processor, which other programs disturb less.
    clock = process_time if args.threads == 1 else perf_counter

    def rows() -> Iterator[Figures]:
        for name, properties in SCHEMAS.items():
            for batch in BATCHES:
                yield {"schema": name, "batch": batch, **measure(grammars, tokens, properties, batch, clock)}

    with tempfile.TemporaryDirectory() as folder:
        path = tokenizer_of(args.vocabulary, Path(folder))
        tokens = Tokenizer.from_file(str(path)).encode(ANSWER, add_special_tokens=False).ids
        grammars = Grammars(path, args.vocabulary, [END], args.threads)
        keep_rows("mask_time", rows(), args.output)


SHAPES = {"off": None, "3,1,4": (3, 1, 4)}
SPARE = 256  # ids of Llama-3.1 that are not text
WAITED_US = 20.0
Event = Any  # None on a CPU


def endless(properties: dict[str, Any]) -> str:
    """A grammar of an object with an array of objects, more than any answer has room for."""
    rows = {"type": "array", "items": closed(properties), "minItems": 100_000}
    return json_schema(closed({"rows": rows}))


def with_vocabulary(model: Path, folder: Path) -> str:
    """A copy of a model, made of links, whose tokenizer has nearly as many tokens as the model."""
    for file in model.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file.resolve())
    least = load_model_config(BUNDLED_MODEL).vocab_size
    tokenizer_of(max(least, load_model_config(model).vocab_size - SPARE), folder)
    return str(folder)


@dataclass
class Watch:
    """Looks at masked steps."""

    seconds: float = 0.0
    nodes: int = 0
    ended: Event = None
    marks: list[tuple[Event, Event, Event, Event]] = field(default_factory=list)
    """Of each step: when the device ended the one before and begins it, comes to its masks, and has them."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        begin, fill, finish = Runner.begin, Masks.after_nodes, Runner.settle
        step, begun = Runner.step, [None]

        def new_begin(runner: Runner, command: Any) -> None:
            begun[0] = _mark()
            begin(runner, command)

        def new_fill(masks: Masks, rows: Sequence[Any], nodes: Any, pinned: bool) -> Any:
            reached, read = _mark(), nodes.read()
            start = time.perf_counter()
            filled = fill(masks, rows, SimpleNamespace(read=lambda: read), pinned)  # type: ignore[arg-type]
            self.seconds += time.perf_counter() - start
            self.nodes += read[2][len(rows)]
            self.marks.append((self.ended, begun[0], reached, _mark()))
            return filled

        def ending(run: Any) -> Any:
            def new(runner: Runner, command: Any) -> Any:
                launch, self.ended = run(runner, command), _mark()
                return launch

            return new

        with (
            patch.object(Runner, "begin", new_begin),
            patch.object(Masks, "after_nodes", new_fill),
            patch.object(Runner, "settle", ending(finish)),
            patch.object(Runner, "step", ending(step)),
        ):
            yield

    def figures(self) -> dict[str, float | None]:
        figures: dict[str, float | None] = {"mask_us_a_node": self.seconds / max(self.nodes, 1) * 1e6}
        if not torch.cuda.is_available():
            return figures | {"waited": None, "waited_us": None, "between_us": None}
        torch.cuda.synchronize()
        waits = [reached.elapsed_time(had) * 1e3 for _, _, reached, had in self.marks]
        long = [each for each in waits if each > WAITED_US]
        between = [ended.elapsed_time(begun) * 1e3 for ended, begun, _, _ in self.marks if ended is not None]
        figures |= {"waited": len(long) / len(waits), "waited_us": mean(long) if long else 0.0}
        return figures | {"between_us": median(between)}


def _mark() -> Event:
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def run(llm: LLM, prompts: list[list[int]], grammar: str | None, tokens: int) -> tuple[float, int, int]:
    """Seconds, steps of the request that took most, and steps without a CUDA graph."""
    eager = scheduler_of(llm).stats().eager_steps
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=grammar is None, grammar=grammar)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    lengths = {len(output.token_ids) for output in outputs}
    assert lengths == {tokens}, f"answers of {lengths} tokens, not {tokens}"
    return (
        seconds,
        max(output.speculation.steps for output in outputs),
        scheduler_of(llm).stats().eager_steps - eager,
    )


def by_schema(llm: LLM, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Free and by each schema, by turns; a first run captures graphs and is not counted."""
    kinds: dict[str, str | None] = {"free": None} | {name: endless(SCHEMAS[name]) for name in args.schemas}
    once: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for grammar in kinds.values():
        run(llm, prompts, grammar, args.new_tokens)
    for _ in range(args.repeats):
        for name, grammar in kinds.items():
            first, *_ = run(llm, prompts, grammar, 1)
            whole, steps, eager = run(llm, prompts, grammar, args.new_tokens)
            rate = len(prompts) * (args.new_tokens - 1) / (whole - first)
            times = {"ms_per_step": (whole - first) / steps * 1e3, "tokens_per_second": rate}
            once[name].append({**times, "steps": steps, "eager_steps": eager})
    figures: dict[str, dict[str, Any]] = {name: {**medians(rows)} for name, rows in once.items()}
    free = figures["free"]
    for name in args.schemas:
        watch, own = Watch(), figures[name]
        with watch.watching():
            run(llm, prompts, kinds[name], args.new_tokens)
        own["tokens_ratio"] = own["tokens_per_second"] / free["tokens_per_second"]
        own["step_ratio"] = free["ms_per_step"] / own["ms_per_step"]
        own |= watch.figures()
    return figures


def row_line(row: Figures) -> str:
    """Free text and each schema on a line."""
    kinds = {name: figures for name, figures in row.items() if isinstance(figures, dict)}
    return "\n".join(f"{line(row)}  {name:8} {line(figures)}" for name, figures in kinds.items())


def main() -> None:
    """What a JSON schema costs: tokens a second and milliseconds a step of the same prompts, free and constrained.

        python -m benchmarks.constrained_speed --model DIR/random/target --eagle3 DIR/random/eagle3 --prompts random
        python -m benchmarks.constrained_speed --model DIR/target --eagle3 DIR/eagle3

    DIR is the output of ``python -m benchmarks.cost_faithful --random``; the target gets a vocabulary of 128,000
    tokens. No answer gets to the end of its schema, so all have the same length. Two ratios to free text are given,
    ``tokens_ratio`` and ``step_ratio`` (free milliseconds a step by constrained ones), because drafts of JSON are
    accepted at another rate than those of free text.

    A further run, which is not timed, looks at the host: ``mask_us_a_node`` includes the constraints' copies.
    ``waited`` is the share of steps in which the device was through with the target before the masks were there,
    ``waited_us`` for how long in such a step. ``between_us`` is the median of the device's time from a step's end
    to the next one's begin. Work that is queued in time begins within a few microseconds. On a CPU only the masks
    are timed.
    """
    parser = load_options(main.__doc__, quantization=True)
    parser.set_defaults(prompt_tokens=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--schemas", nargs="+", choices=SCHEMAS, default=list(SCHEMAS))
    args = parse_load(parser)
    sizes = [size for size in args.batches if size <= args.max_batch]
    prompts = make_prompts(args, max(sizes))

    def rows() -> Iterator[Figures]:
        for shape in args.shapes:
            with open_llm(args, SHAPES[shape], max(sizes)) as llm:
                for size in sizes:
                    yield {"shape": SHAPES[shape], "batch": size, **by_schema(llm, prompts[:size], args)}

    with tempfile.TemporaryDirectory() as folder, weights_kept():
        args.model = with_vocabulary(Path(args.model), Path(folder))
        keep_rows("constrained_speed", rows(), args.output, row_line)


_NAME = {"type": "string", "maxLength": 12}
BOOK = closed(
    {
        "title": {"type": "string", "maxLength": 30},
        "published": {"type": "boolean"},
        "rating": {"enum": ["excellent", "good", "poor"]},
        "author": closed({"first_name": _NAME, "last_name": _NAME}),
    }
)
DUE_TEXT_SHAPES: list[tuple[str, tuple[int, int, int]]] = [
    ("EAGLE3", (5, 1, 6)),
    ("EAGLE3", (5, 4, 16)),
    ("NGRAM", (5, 1, 6)),
    ("NGRAM", (8, 3, 16)),
    ("EAGLE3+NGRAM", (5, 4, 16)),
]


def measure_due_text(count: int) -> Iterator[Figures]:
    grammars = [json_schema(schema) for schema in (PERSON, WEATHER, BOOK)]
    prompts = [f"User: Tell me about number {index} as JSON.\nAssistant: " for index in range(count)]
    free = [
        SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=120) for index in range(count)
    ]
    held = [
        msgspec.structs.replace(each, grammar=grammars[index % len(grammars)])
        for index, each in enumerate(free)
    ]
    nothing: Any = patch.object(Masks, "forced", lambda *_: [])
    expected: dict[str, list[list[int]]] = {}
    for algorithm, shape in DUE_TEXT_SHAPES:
        row: Figures = {"algorithm": algorithm, "shape": shape}
        with LLM(speculative_algorithm=algorithm, max_running_requests=8, **shape_settings(shape)) as llm:
            for name, params, drafts in (
                ("free", free, nullcontext()), ("json", held, nothing), ("json, due text drafted", held, nullcontext())
            ):  # fmt: skip
                with drafts:
                    outputs = llm.generate(prompts, params)
                texts = [output.token_ids for output in outputs]
                kind = name.partition(",")[0]
                assert expected.setdefault(kind, texts) == texts, f"{algorithm}, {name}: another text"
                row[name] = round(tokens_per_step(outputs), 2)
        yield row


def due_text() -> None:
    """Accepted length of JSON under a schema, with and without drafting of forced text, and of free text.

        python -m benchmarks.constrained_speed due_text [--texts 48]

    The bundled model answers the same prompts, greedily and at temperature 0.7, unconstrained and under one of
    three schemas. A step is one target forward that emitted tokens; the bonus token counts. All rows have the same
    texts.
    """
    parser = options(due_text.__doc__)
    parser.add_argument("--texts", type=int, default=48)
    args = parser.parse_args()
    keep_rows("due_text", measure_due_text(args.texts), args.output)


if __name__ == "__main__":
    run_command(main, mask_time, due_text)
