"""Tokens a step: by shape and temperature, by method, and with predicted texts."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from specserve_kernels import dequantize_packed, pack
from torch import Tensor

import specserve.datastore
from benchmarks.common import (
    CODE_TOKENS,
    Drafting,
    Shape,
    encode,
    load_prompts,
    parse_drafting,
    run_prompts,
    shape_settings,
    tokens_per_step,
)
from benchmarks.results import Figures, keep_rows, options, run_command
from examples.bundled_model.dialogues import Shares, dialogues
from examples.bundled_model.stdlib_text import modules
from specserve import LLM, SamplingParams
from specserve.config.paths import BUNDLED_DRAFTS, BUNDLED_MODEL
from specserve.config.settings import ROUNDED
from specserve.constraints.masks import Masks
from specserve.grammar import choice
from specserve.layers import linear
from specserve.layers.formats.rounded import RoundedLayout
from specserve.methods import NONE
from specserve.outputs import RequestOutput
from specserve.scheduler.observers import DraftTemperatureObserver
from specserve.speculation.step import draft_tree

SHAPES = [
    ("EAGLE3", (3, 1, 4)),
    ("EAGLE3", (5, 1, 6)),
    ("EAGLE3", (5, 4, 8)),
    ("EAGLE3", (5, 4, 16)),
    ("EAGLE3", (5, 8, 32)),
    ("EAGLE3", (8, 4, 32)),
    ("EAGLE", (5, 1, 6)),
    ("EAGLE", (5, 4, 16)),
]


GUESSES = ("at a learned temperature", "at the request's", "without noise")


@contextmanager
def guessing(how: str) -> Iterator[None]:
    """Guess as the engine does, always at the request's temperature, or without the sampler's noise: the draft's most
    likely tokens, as the peers draft."""

    def without_noise(context: Any, view: Any, shape: Any, sampling: Any) -> Any:
        return draft_tree(context, view, shape, replace(sampling, noise_BDV=None))

    with ExitStack() as stack:
        if how == GUESSES[1]:
            stack.enter_context(patch.object(DraftTemperatureObserver, "emitted", lambda *_: None))
        if how == GUESSES[2]:
            stack.enter_context(patch("specserve.speculation.step.draft_tree", without_noise))
        yield


@contextmanager
def rounding(weights: str) -> Iterator[str]:
    """Yield the server's setting for this rounding of the draft's weights. int4 replaces fp8, which does not round
    inputs."""
    if weights != "int4":
        yield weights
        return

    def quantize(weight_OI: Tensor, _: object) -> tuple[Tensor]:
        numbers = RoundedLayout("int4").numbers({"weight": weight_OI}, weight_OI.device)
        return (dequantize_packed(pack(numbers), weight_OI.dtype),)

    with (
        patch.object(linear, "quantize", quantize),
        patch.object(linear, "dequantize", lambda values: values),
    ):
        yield "fp8"


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    rows, first = load_prompts(), dict[tuple[str, float], list[list[int]]]()
    cases: list[tuple[str, Drafting]] = [each for each in SHAPES if each[0] == "EAGLE3" or not args.eagle3]
    if args.shapes:
        cases = [("EAGLE3" if shape else NONE, shape) for shape in args.shapes]
    for (algorithm, shape), target, rounded in product(cases, args.quantization, args.weights):
        settings: dict[str, Any] = {"model_path": args.model, "quantization": target, **shape_settings(shape)}
        settings |= {"speculative_algorithm": algorithm, "max_running_requests": args.batch}
        if shape and args.eagle3:
            settings["speculative_draft_model_path"] = args.eagle3
        with (
            rounding(rounded) as settings["speculative_draft_quantization"],
            LLM(**settings) as llm,
        ):
            for temperature in args.temperatures:
                for how in GUESSES if temperature and not args.shapes else GUESSES[:1]:
                    clock = Clock()
                    with guessing(how), clock.running():
                        outputs = run_prompts(llm, rows, temperature=temperature)
                    texts = list(zip(outputs, rows, strict=True))
                    ids = [output.token_ids for output in outputs]
                    yield {
                        **{"algorithm": algorithm, "shape": shape, "target": target, "weights": rounded},
                        **{"temperature": temperature, "guesses": how},
                        "accepted share": sum(o.speculation.accepted for o in outputs)
                        / max(sum(o.speculation.drafted for o in outputs), 1),
                        "all": tokens_per_step(outputs),
                        "dialogue": tokens_per_step([o for o, r in texts if "messages" in r]),
                        "code": tokens_per_step([o for o, r in texts if "prompt" in r]),
                        "tokens_per_second": sum(map(len, ids)) / clock.seconds,
                        "same": sum(map(list.__eq__, ids, first.setdefault((target, temperature), ids))),
                    }


def main() -> None:
    """Tokens per step on held-out prompts by drafter, shape, temperature and way of guessing.

        python -m benchmarks.acceptance [--temperatures 0 0.7 1.0] [--batch 16] [--weights none int8 fp8 int4]
            [--quantization none fp8 int8 int4] [--output FILE]
        python -m benchmarks.acceptance --model MODEL --eagle3 DRAFT --shapes off 3,1,4 5,4,16 adaptive [--batch 1]

    A step is one target forward that emitted tokens, without prefill; the bonus token counts. The texts are the
    same for every row of a temperature (drafting never changes a token), so the rows compare only drafting: ``same``
    counts those of the first one. Tokens per second are by the wall clock, prefill included. ``--shapes``: of EAGLE-3,
    which guesses as the server does, instead of the table's.
    ``--weights``: quantization of the draft; int4, which no server drafts in, is that of ``--quantization int4``.
    ``--quantization``: that of the target, which has its own texts.
    """
    parser = options(main.__doc__)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 0.7, 1.0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--model", default=str(BUNDLED_MODEL), help="another one needs --eagle3")
    parser.add_argument("--eagle3", help="directory of its EAGLE-3 draft; not set: the bundled model's")
    parser.add_argument("--shapes", nargs="+", type=parse_drafting, help="steps,topk,tokens, off or adaptive")
    parser.add_argument("--weights", nargs="+", choices=("none", "int8", "fp8", "int4"), default=["none"])
    parser.add_argument("--quantization", nargs="+", choices=("none", *ROUNDED), default=["none"])
    args = parser.parse_args()
    keep_rows("acceptance", measure(args), args.output)


def open_llm(algorithm: str, shape: Shape | None, **settings: Any) -> LLM:
    """One request at a time; ``shape`` is None for plain decoding."""
    return LLM(speculative_algorithm=algorithm, max_running_requests=1, **shape_settings(shape), **settings)


PREDICTION_SHAPES: list[Shape | None] = [None, (5, 1, 6), (8, 1, 9), (5, 4, 16)]
PARAMS = SamplingParams(temperature=0, max_tokens=CODE_TOKENS, ignore_eos=True)
KEYWORDS = {
    *("self", "return", "def", "if", "in", "the", "for", "not"),
    *("is", "None", "class", "of", "a", "and", "to"),
}


def before_the_edit(text: str) -> str:
    """The text with a name changed, lines left out and lines twice."""
    names = Counter(name for name in re.findall(r"[A-Za-z_]\w*", text) if name not in KEYWORDS)
    if names:
        name = names.most_common(1)[0][0]
        text = re.sub(rf"\b{name}\b", "other_value", text)
    lines = text.split("\n")
    kept = [[line] * (2 if i % 7 == 6 else 1) for i, line in enumerate(lines) if i % 6 != 5]
    return "\n".join(line for each in kept for line in each)


def variants(texts: Sequence[str]) -> dict[str, list[str | None]]:
    """A prediction for each answer."""
    return {
        "none": [None] * len(texts),
        "same": list(texts),
        "edited": [before_the_edit(text) for text in texts],
        "unrelated": [*texts[1:], texts[0]],
    }


@dataclass
class Clock:
    """Seconds of the blocks that it timed: by the clock, and of the processors' work."""

    seconds: float = 0.0
    processor_seconds: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        begin, worked = time.perf_counter(), time.process_time()
        yield
        self.seconds += time.perf_counter() - begin
        self.processor_seconds += time.process_time() - worked


def timed(llm: LLM, prompt: str, prediction: str | None, repeats: int) -> tuple[float, float, RequestOutput]:
    """Least seconds of an answer: by the clock, and of the processors' work."""
    params, clocks = msgspec.structs.replace(PARAMS, prediction=prediction), [Clock() for _ in range(repeats)]
    for clock in clocks:
        with clock.running():
            (output,) = llm.generate(prompt, params)
    return min(c.seconds for c in clocks), min(c.processor_seconds for c in clocks), output


def measure_predictions(prompts: Sequence[str], repeats: int) -> Iterator[Figures]:
    with open_llm(NONE, None) as llm:
        texts = [output.text for output in llm.generate(prompts, PARAMS)]
    for shape in PREDICTION_SHAPES:
        kinds = variants(texts) if shape is not None else {"none": [None] * len(texts)}
        rows: dict[str, list[tuple[float, float, RequestOutput]]] = {name: [] for name in kinds}
        with open_llm(NONE if shape is None else "EAGLE3", shape) as llm:
            for index, prompt in enumerate(prompts):
                for name, predictions in kinds.items():
                    rows[name].append(timed(llm, prompt, predictions[index], repeats))
        for name, answered in rows.items():
            seconds, worked, outputs = zip(*answered, strict=True)
            assert [output.text for output in outputs] == texts, f"{shape}, {name}: another text"
            yield {
                "shape": shape,
                "prediction": name,
                "tokens_per_step": round(tokens_per_step(outputs), 2),
                "predicted": sum(output.speculation.predicted for output in outputs),
                "tokens": sum(len(output.token_ids) for output in outputs),
                "seconds": round(sum(seconds), 2),
                "processor_seconds": round(sum(worked), 2),
            }


def prediction() -> None:
    """The gain from predicted texts: tokens per step and seconds of code answers, one greedy request at a time.

        python -m benchmarks.acceptance prediction [--prompts 12] [--repeats 3]

    The bundled model can't edit a given file, so the edit is made in reverse: the model continues a held-out code
    prefix, and its own answer is turned into what the text may have been before. ``same`` is the answer itself;
    ``edited`` has its most frequent name changed, every sixth line left out and every seventh doubled;
    ``unrelated`` is the answer to another prompt. All rows have the same texts. Seconds are the minimum of the
    repeats, summed: wall-clock time, and processor time, which other programs disturb less.
    """
    parser = options(prediction.__doc__)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    prompts = [row["prompt"] for row in load_prompts() if "prompt" in row][: args.prompts]
    keep_rows("prediction", measure_predictions(prompts, args.repeats), args.output)


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


def workloads(model: str, count: int, temperature: float) -> dict[str, Work]:
    """Prompts and how they are answered."""
    rows, params = load_prompts(), SamplingParams(temperature=temperature, seed=0, max_tokens=CODE_TOKENS)
    with open_llm(NONE, None, cpu_threads=1, model_path=model) as llm:
        tokenizer = llm.tokenizer
        assert tokenizer is not None
        chats = [encode(tokenizer, row) for row in rows if "messages" in row][:count]
        codes = [row["prompt"] for row in rows if "prompt" in row][:count]
        answers = [output.text for output in llm.generate(codes, params)]
        again = [
            (
                tokenizer.encode(f"{before_the_edit(answer)}\n\n\n{code}"),
                msgspec.structs.replace(params, max_tokens=2 * CODE_TOKENS, grammar=choice([answer])),
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


def measure_methods(args: argparse.Namespace, temperature: float, store: Path) -> Iterator[Figures]:
    """The first is plain decoding, whose texts the others are compared with."""
    work = workloads(args.model, args.prompts, temperature)
    plain: dict[str, list[list[int]]] = {}
    for algorithm, shape in METHODS:
        settings: dict[str, Any] = {"model_path": args.model}
        if algorithm == "REST":
            settings["speculative_datastore"] = str(store)
        if args.eagle3 and algorithm.partition("+")[0] in BUNDLED_DRAFTS:
            if not algorithm.startswith("EAGLE3"):
                continue
            settings["speculative_draft_model_path"] = args.eagle3
        figures: dict[str, dict[str, float]] = {}
        outputs: list[RequestOutput] = []
        same = 0
        with (
            open_llm(algorithm, shape, cpu_threads=1, **settings) as llm,
            patch.object(Masks, "forced", lambda *_: []),
        ):
            llm.generate("The first request.", SamplingParams(max_tokens=16, ignore_eos=True))
            for name, requests in work.items():
                clock = Clock()
                with clock.running():
                    answers = llm.generate(
                        [prompt for prompt, _ in requests], [params for _, params in requests]
                    )
                texts = [output.token_ids for output in answers]
                same += sum(map(list.__eq__, texts, plain.setdefault(name, texts)))
                tokens = sum(map(len, texts))
                figures[name] = {
                    "tokens_per_step": round(tokens_per_step(answers), 3),
                    "tokens_per_second": round(tokens / clock.seconds, 1),
                    "tokens_per_processor_second": round(tokens / clock.processor_seconds, 1),
                }
                outputs += answers
        row = {"method": algorithm, "shape": shape, "temperature": temperature, **figures}
        yield row | {"all": round(tokens_per_step(outputs), 3), "same": same, "texts": len(outputs)}


def table(figures: Sequence[Figures]) -> list[str]:
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


def methods() -> None:
    """Tokens a step and tokens a second of each drafting method, on dialogues, code and repeated text.

        python -m benchmarks.acceptance methods [--prompts 6] [--temperatures 0 0.8]
            [--model MODEL --eagle3 DRAFT]

    The methods that the bundled model has a draft for, and those that need none, one request at a time. The bundled
    model can't edit a given text, so the edit is made in reverse, as in ``prediction``: an edited copy
    of the model's own answer to a code prompt precedes the prompt, and a grammar forces that answer, which is not
    drafted for that. REST reads a datastore of dialogues like those of training and of the library's modules,
    without those that are held out.

    A step is one target forward that emitted tokens; the bonus token counts. Seconds are those of whole answers,
    prompts included, on one thread, as the server has on two cores: by the clock, and of processor time, which
    other programs disturb less. All rows of a workload have the same texts, except where rounding in float32 breaks
    a near-tie; ``same`` counts the texts of plain decoding. A row's workloads run one after the other in one
    engine, so SUFFIX has already generated the code that is rewritten. Prints at the end the table that
    docs/performance.md shows.
    """
    parser = options(methods.__doc__)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--model", default=str(BUNDLED_MODEL), help="another one needs --eagle3")
    parser.add_argument("--eagle3", help="directory of its EAGLE-3 draft, the only one that is measured then")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = make_datastore(Path(folder))
        rows = (row for each in args.temperatures for row in measure_methods(args, each, store))
        figures = keep_rows("methods", rows, args.output)
    print(*table(figures), sep="\n")


if __name__ == "__main__":
    run_command(main, prediction, methods)
