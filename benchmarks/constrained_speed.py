"""What a JSON schema costs: tokens a second and milliseconds a step of the same prompts, free and constrained.

    python -m benchmarks.constrained_speed --model DIR/random/target --eagle3 DIR/random/eagle3 --prompts random
    python -m benchmarks.constrained_speed --model DIR/target --eagle3 DIR/eagle3

DIR is the output of ``python -m benchmarks.cost_faithful --random``; the target gets a vocabulary of 128,000 tokens. No
answer gets to the end of its schema, so all have the same length. Two ratios to free text are given, ``tokens_ratio``
and ``step_ratio`` (free milliseconds a step by constrained ones), because drafts of JSON are accepted at another rate
than those of free text. ``goal`` is meant for the first with random weights, and for the second with the trained pair.

A further run, which is not timed, looks at the host: ``mask_us_a_node`` includes the constraints' copies. ``waited`` is
the share of steps in which the device was through with the target before the masks were there, ``waited_us`` for how
long in such a step. ``between_us`` is the median of the device's time from a step's end to the next one's begin. Work
that is queued in time begins within a few microseconds. On a CPU only the masks are timed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common import load_options, make_prompts, open_llm, parse_load, weights_kept, write_results
from benchmarks.mask_time import BOUNDED, PLAIN, tokenizer_of
from specserve import LLM, SamplingParams
from specserve.config.paths import BUNDLED_MODEL
from specserve.engine.masks import Masks
from specserve.engine.runner import Runner
from specserve.grammar import json_schema
from specserve.models.read_config import load_model_config

SHAPES = {"off": None, "3,1,4": (3, 1, 4)}
SCHEMAS: dict[str, dict[str, Any]] = {"plain": PLAIN, "bounded": BOUNDED}
SPARE = 256  # ids of Llama-3.1 that are not text
WAITED_US = 20.0
Event = Any  # None on a CPU


def endless(properties: dict[str, Any]) -> str:
    """A grammar of an object with an array of objects, more than any answer has room for."""
    closed = {"type": "object", "additionalProperties": False}
    item = {**closed, "properties": properties, "required": [*properties]}
    rows = {"type": "array", "items": item, "minItems": 100_000}
    return json_schema({**closed, "properties": {"rows": rows}, "required": ["rows"]})


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
            found = fill(masks, rows, SimpleNamespace(read=lambda: read), pinned)  # type: ignore[arg-type]
            self.seconds += time.perf_counter() - start
            self.nodes += read[2][len(rows)]
            self.marks.append((self.ended, begun[0], reached, _mark()))
            return found

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

    def found(self) -> dict[str, float | None]:
        found: dict[str, float | None] = {"mask_us_a_node": self.seconds / max(self.nodes, 1) * 1e6}
        if not torch.cuda.is_available():
            return found | {"waited": None, "waited_us": None, "between_us": None}
        torch.cuda.synchronize()
        waits = [reached.elapsed_time(had) * 1e3 for _, _, reached, had in self.marks]
        long = [each for each in waits if each > WAITED_US]
        between = [ended.elapsed_time(begun) * 1e3 for ended, begun, _, _ in self.marks if ended is not None]
        found |= {"waited": len(long) / len(waits), "waited_us": mean(long) if long else 0.0}
        return found | {"between_us": median(between)}


def _mark() -> Event:
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def run(llm: LLM, prompts: list[list[int]], grammar: str | None, tokens: int) -> tuple[float, int, int]:
    """Seconds, steps of the request that took most, and steps without a CUDA graph."""
    assert llm.engine is not None
    eager = llm.engine.stats().eager_steps
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=grammar is None, grammar=grammar)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    lengths = {len(output.token_ids) for output in outputs}
    assert lengths == {tokens}, f"answers of {lengths} tokens, not {tokens}"
    return (
        seconds,
        max(output.speculation.steps for output in outputs),
        llm.engine.stats().eager_steps - eager,
    )


def measure(llm: LLM, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
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
    found: dict[str, dict[str, Any]] = {
        name: {key: median(row[key] for row in rows) for key in rows[0]} for name, rows in once.items()
    }
    free = found["free"]
    for name in args.schemas:
        watch, own = Watch(), found[name]
        with watch.watching():
            run(llm, prompts, kinds[name], args.new_tokens)
        own["tokens_ratio"] = own["tokens_per_second"] / free["tokens_per_second"]
        own["step_ratio"] = free["ms_per_step"] / own["ms_per_step"]
        own |= watch.found()
    return found


def line(shape: str, batch: int, kind: str, found: dict[str, Any]) -> str:
    figures = ", ".join(f"{name} {value:.3g}" for name, value in found.items() if value is not None)
    return f"{shape:6} batch {batch:3} {kind:8} {figures}"


def main() -> None:
    parser = load_options(__doc__, quantization=True)
    parser.set_defaults(prompt_tokens=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--schemas", nargs="+", choices=SCHEMAS, default=list(SCHEMAS))
    args = parse_load(parser)
    sizes = [size for size in args.batches if size <= args.max_batch]
    prompts, rows = make_prompts(args, max(sizes)), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder, weights_kept():
        args.model = with_vocabulary(Path(args.model), Path(folder))
        for shape in args.shapes:
            with open_llm(args, SHAPES[shape], max(sizes)) as llm:
                for size in sizes:
                    found = measure(llm, prompts[:size], args)
                    rows.append({"shape": SHAPES[shape], "batch": size, "goal": 0.95, **found})
                    path = write_results("constrained_speed", rows, args.output)
                    print(*(line(shape, size, *each) for each in found.items()), sep="\n", flush=True)
    print(path)


if __name__ == "__main__":
    main()
