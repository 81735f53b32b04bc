"""Tokens a step and tokens a second of each drafting method, on dialogues, code and repeated text.

    python -m benchmarks.methods [--prompts 6] [--temperatures 0 0.8]

The methods that the bundled model has a draft for, and those that need none, one request at a time. The bundled model
can't edit a given text, so the edit is made in reverse, as in ``benchmarks.prediction``: an edited copy of the model's
own answer to a code prompt precedes the prompt, and a grammar forces that answer, which is not drafted for that. REST
reads a datastore of dialogues like those of training and of the library's modules, without those that are held out.

A step is one target forward that emitted tokens; the bonus token counts. Seconds are those of whole answers, prompts
included, on one thread, as the server has on two cores: by the clock, and of processor time, which other programs
disturb less. All rows of a workload have the same texts, except where rounding in float32 breaks a near-tie; ``same``
counts the texts of plain decoding. A row's workloads run one after the other in one engine, so SUFFIX has already
generated the code that is rewritten. Prints at the end what docs/performance.md shows: a table and three sentences.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

import specserve.datastore
from benchmarks.acceptance import tokens_per_step
from benchmarks.common import CODE_TOKENS, load_prompts, shape_settings, write_results
from benchmarks.floors import Shape
from benchmarks.prediction import before_the_edit
from examples.bundled_model.dialogues import Shares, dialogues
from examples.bundled_model.stdlib_text import modules
from specserve import LLM, SamplingParams
from specserve.engine.masks import Masks
from specserve.grammar import choice
from specserve.methods import NONE
from specserve.outputs import RequestOutput

METHODS: list[tuple[str, Shape | None]] = [
    (NONE, None),
    ("EAGLE", (5, 1, 6)),
    ("EAGLE3", (5, 1, 6)),
    ("EAGLE3", (7, 1, 8)),
    ("EAGLE3", (5, 4, 16)),
    ("DSPARK", (7, 1, 8)),
    ("MEDUSA", (5, 1, 6)),
    ("MLP_SPECULATOR", (4, 1, 5)),
    ("NGRAM", (15, 1, 16)),
    ("SUFFIX", (15, 1, 16)),
    ("REST", (15, 1, 16)),
    ("LOOKAHEAD", (9, 9, 56)),
    ("EAGLE3+NGRAM", (5, 4, 16)),
    ("EAGLE3+SUFFIX", (5, 4, 16)),
    ("DSPARK+SUFFIX", (7, 4, 16)),
]
WORKLOADS = ("dialogue", "code", "rewriting")
STORED_DIALOGUES = 20_000  # without tools and JSON; the model was trained on two thirds of them
Work = list[tuple[list[int], SamplingParams]]


def open_llm(algorithm: str, shape: Shape | None, **settings: Any) -> LLM:
    """One request at a time, one thread; ``shape`` is None for plain decoding."""
    if shape is not None:
        settings |= shape_settings(shape)
    return LLM(speculative_algorithm=algorithm, max_running_requests=1, cpu_threads=1, **settings)


def make_datastore(folder: Path) -> Path:
    """Write REST's file of training texts; takes half a minute."""
    texts, store = folder / "texts.jsonl", folder / "texts.idx"
    with texts.open("w") as file:
        for dialogue in dialogues(STORED_DIALOGUES, shares=Shares(0, 0)):
            file.write(json.dumps({"messages": dialogue["messages"]}) + "\n")
        for module in modules():
            if not module.held_out:
                file.write(json.dumps({"text": module.text}) + "\n")
    assert specserve.datastore.main(["--data", str(texts), "--output", str(store)]) == 0
    return store


def workloads(count: int, temperature: float) -> dict[str, Work]:
    """Prompts and how they are answered."""
    rows, params = load_prompts(), SamplingParams(temperature=temperature, seed=0, max_tokens=CODE_TOKENS)
    with open_llm(NONE, None) as llm:
        tokenizer = llm.tokenizer
        assert tokenizer is not None
        chats = [tokenizer.encode_chat(row["messages"]) for row in rows if "messages" in row][:count]
        codes = [row["prompt"] for row in rows if "prompt" in row][:count]
        answers = [output.text for output in llm.generate(codes, params)]
        again = [
            (
                tokenizer.encode(f"{before_the_edit(answer)}\n\n\n{code}"),
                replace(params, max_tokens=2 * CODE_TOKENS, grammar=choice([answer])),
            )
            for code, answer in zip(codes, answers, strict=True)
            if answer
        ]
        made = [
            [(chat, params) for chat in chats],
            [(tokenizer.encode(code), params) for code in codes],
            again,
        ]
        return dict(zip(WORKLOADS, made, strict=True))


def measure(count: int, temperature: float, store: Path) -> list[dict[str, Any]]:
    """Print each row as it comes. The first is plain decoding, whose texts the others are compared with."""
    figures: list[dict[str, Any]] = []
    work = workloads(count, temperature)
    plain: dict[str, list[list[int]]] = {}
    for algorithm, shape in METHODS:
        row: dict[str, Any] = {"method": algorithm, "shape": shape, "temperature": temperature}
        settings = {"speculative_datastore": str(store)} if algorithm == "REST" else {}
        outputs: list[RequestOutput] = []
        same = 0
        with (
            open_llm(algorithm, shape, **settings) as llm,
            patch.object(Masks, "due", lambda *_: []),
        ):
            llm.generate("The first request.", SamplingParams(max_tokens=16, ignore_eos=True))
            for name, requests in work.items():
                begin, worked = time.perf_counter(), time.process_time()
                found = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
                seconds, work_seconds = time.perf_counter() - begin, time.process_time() - worked
                texts = [output.token_ids for output in found]
                same += sum(map(list.__eq__, texts, plain.setdefault(name, texts)))
                tokens = sum(map(len, texts))
                row[name] = {
                    "tokens_per_step": round(tokens_per_step(found), 3),
                    "tokens_per_second": round(tokens / seconds, 1),
                    "tokens_per_processor_second": round(tokens / work_seconds, 1),
                }
                outputs += found
        row |= {"all": round(tokens_per_step(outputs), 3), "same": same, "texts": len(outputs)}
        figures.append(row)
        print(row, flush=True)
    return figures


def table(figures: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows of the table in docs/performance.md, without its head."""
    cells: dict[str, list[str]] = {}
    for row in figures:
        shape = ", ".join(map(str, row["shape"] or ()))
        name = f"`{row['method']}` | {shape}" if shape else "plain decoding | "
        cells.setdefault(name, []).extend(
            f"{row[each]['tokens_per_step']:.2f} ({row[each]['tokens_per_processor_second']:.0f})"
            for each in WORKLOADS
        )
    return [f"| {name} | {' | '.join(each)} |" for name, each in cells.items()]


def comparison(figures: Sequence[dict[str, Any]]) -> str:
    """Return the sentences below the table, of greedy texts: a block drafter's chain next to EAGLE-3's of the same
    length, and the gain from copied text where answers repeat."""
    steps = {
        (row["method"], tuple(row["shape"] or ())): {each: row[each]["tokens_per_step"] for each in WORKLOADS}
        | {"all": row["all"]}
        for row in figures
        if row["temperature"] == 0
    }
    block, chain = steps["DSPARK", (7, 1, 8)], steps["EAGLE3", (7, 1, 8)]
    first, second, third, all_ = (f"{block[each] / chain[each]:.2f}" for each in (*WORKLOADS, "all"))
    alone = steps["EAGLE3", (5, 4, 16)]
    better = []
    for name in ("NGRAM", "SUFFIX"):
        both, lookup = steps[f"EAGLE3+{name}", (5, 4, 16)], steps[name, (15, 1, 16)]
        better += [f"{both['rewriting'] / alone['rewriting']:.2f}"]
        better += [f"{both[each] / max(alone[each], lookup[each]):.2f}" for each in WORKLOADS]
    ngram, *of_ngram, suffix, u, v, w = better
    return (
        f"With greedy chains of 7, `DSPARK` gives {first} times as many tokens a step as `EAGLE3` on dialogue, "
        f"{second} on code, {third} on rewriting and {all_} on all three. With 16 nodes on rewriting, `EAGLE3+NGRAM` "
        f"gives {ngram} and `EAGLE3+SUFFIX` {suffix} times as many as `EAGLE3` alone. Of the better of their two "
        f"sources `EAGLE3+NGRAM` gives {', '.join(of_ngram)} and `EAGLE3+SUFFIX` {u}, {v}, {w} times as many on the "
        "three workloads."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        store = make_datastore(Path(folder))
        for temperature in args.temperatures:
            figures += measure(args.prompts, temperature, store)
    path = write_results("methods", figures, args.output)
    print(*table(figures), "", sep="\n")
    if 0 in args.temperatures:
        print(comparison(figures), "\n")
    print("written to", path)


if __name__ == "__main__":
    main()
