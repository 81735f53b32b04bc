"""The controller against fixed shapes and against drafts that are never right."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import specserve.models.read_config
import specserve.process.assemble
from benchmarks.closed_loop import NONE, ClosedLoop, Step, endless, forced_levels
from benchmarks.common import (
    ADAPTIVE,
    eagle3_settings,
    load_options,
    make_prompts,
    parse_load,
    parse_shape,
    random_prompts,
    scheduler_of,
    used_tokens,
)
from benchmarks.results import Figures, keep_rows, line, options, run_command
from benchmarks.weights import Weights
from specserve import LLM, SamplingParams
from specserve.config.paths import BUNDLED_MODEL
from specserve.engine.shapes import ShapePlan, ShapePolicy, Speculation, StaticShapes, step_shape
from specserve.models.config import ModelConfig
from specserve.speculation.shape import StepShape
from specserve.tools.tune.loop import MeteredRunner
from tests.reference.arctic_lstm import make_arctic_lstm
from tests.reference.hydra import make_hydra
from tests.reference.medusa import make_medusa
from tests.reference.mlp_speculator import make_mlp_speculator
from tests.reference.models import make_llama
from tests.reference.p_eagle import make_p_eagle
from tests.reference.redrafter import make_redrafter
from tests.reference.standalone import make_pard

STATIC: tuple[Speculation, ...] = ((1, 1, 2), (2, 1, 3), (3, 1, 4), (5, 1, 6), (4, 4, 16), (5, 8, 32))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = 64  # at least, however small the batches
FAR_BEHIND = 0.85  # of the best rate


@dataclass(frozen=True, slots=True)
class WiderPlan(ShapePlan):
    """Also has ``fixed`` shapes, for batches of at least ``smallest``."""

    fixed: tuple[Speculation, ...] = STATIC
    smallest: int = 1

    def shapes(self) -> list[StepShape]:
        sizes = [size for size in self.padding.buckets or (self.most_slots,) if size >= self.smallest]
        fixed = [step_shape(size, each, size) for size in sizes for each in self.fixed]
        return list(dict.fromkeys([*ShapePlan.shapes(self), *fixed]))


@contextmanager
def adaptive_llm(
    args: argparse.Namespace,
    batch: int,
    fixed: Sequence[Speculation] = STATIC,
    smallest: int = 1,
    **settings: Any,
) -> Iterator[tuple[LLM, dict[str, ShapePolicy]]]:
    """An engine under the controller, and all policies that its scheduler may be given: plain decoding, the ``fixed``
    shapes, which batches smaller than ``smallest`` run without graphs, and the controller."""
    made: list[WiderPlan] = []
    plan_of = specserve.process.assemble.shape_plan

    def wider(config: Any) -> WiderPlan:
        plan = plan_of(config)
        fields = plan.speculation, plan.adaptive, plan.most_slots, plan.padding, plan.drafts
        made.append(WiderPlan(*fields, fixed=tuple(fixed), smallest=smallest))
        return made[-1]

    common: dict[str, Any] = {
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
        "max_running_requests": batch,
        "speculative_token_map": args.token_map,
    } | eagle3_settings(ADAPTIVE, args.eagle3)
    with (
        patch.object(specserve.process.assemble, "shape_plan", wider),
        patch.object(specserve.process.assemble, "Runner", MeteredRunner),
        LLM(args.model, **common | settings) as llm,
    ):
        padding = made[-1].padding
        policies: dict[str, ShapePolicy] = {"off": StaticShapes(None, padding)}
        policies |= {spelled(each): StaticShapes(each, padding) for each in fixed if each}
        yield llm, policies | {"adaptive": scheduler_of(llm).policy}


def spelled(speculation: Speculation) -> str:
    """Levels, branching, and the nodes that a slot has of the budget."""
    return ",".join(map(str, speculation))


@contextmanager
def under(llm: LLM, policy: ShapePolicy) -> Iterator[None]:
    """The engine's steps have the shapes of ``policy``; it is told of all of them before the next one rules."""
    engine = scheduler_of(llm)
    before, engine.policy = engine.policy, policy
    try:
        yield
    finally:
        assert llm.engine is engine, "its thread waits from here on"
        while engine.has_work:
            engine.run_once()
        engine.policy = before


@dataclass(frozen=True, slots=True)
class Load:
    """``batch`` requests at a time until ``requests`` have ended: the same for every shape, different in each turn."""

    prompts: Sequence[list[int]]
    batch: int
    new_tokens: int
    requests: int
    temperature: float = 0.0

    @classmethod
    def of(cls, args: argparse.Namespace, prompts: Sequence[list[int]], batch: int) -> Load:
        return cls(prompts, batch, args.new_tokens, max(args.requests, 2 * batch))


@dataclass(frozen=True, slots=True)
class Run:
    """Wall-clock seconds, the tokens that steps emitted meanwhile, and device seconds of prefill launches."""

    seconds: float
    tokens: int
    prefill: float
    steps: Sequence[Step]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def run_load(llm: LLM, policy: ShapePolicy, load: Load, turn: int = 0) -> Run:
    """The load under a policy, from a full batch on."""
    runner = scheduler_of(llm).runner
    assert isinstance(runner, MeteredRunner)
    first = turn * (load.batch + load.requests)
    jobs = {"": endless(load.prompts, load.new_tokens, first, temperature=load.temperature, ignore_eos=True)}
    wanted = {"": load.batch}
    with ClosedLoop(scheduler_of(llm), policy, jobs) as loop:
        loop.fill(wanted)
        begin, earlier = loop.now(), len(runner.prefills)
        loop.run_requests(wanted, load.requests)
        end, later = loop.now(), len(runner.prefills)
        steps = [step for step in loop.steps if begin <= step.at < end]
        tokens = sum(each.tokens for each in loop.deliveries if begin <= each.at < end and each.by_step)
    # The loop has waited for all that was in flight.
    return Run(end - begin, tokens, sum(watch.seconds for watch in runner.prefills[earlier:later]), steps)


def by_shape(steps: Sequence[Step]) -> dict[str, dict[str, float]]:
    """Of each shape that ran, most often first: steps, tokens a step of a request, milliseconds a step."""
    groups: dict[str, list[Step]] = {}
    for step in steps:
        groups.setdefault(step.shape, []).append(step)
    return {
        shape: {
            "steps": len(group),
            "accepted_length": accepted_length(group),
            "ms": 1e3 * sum(step.seconds for step in group) / len(group),
        }
        for shape, group in sorted(groups.items(), key=lambda item: -len(item[1]))
    }


def accepted_length(steps: Sequence[Step]) -> float:
    """Tokens a step of a request."""
    return sum(step.emitted for step in steps) / sum(step.requests for step in steps)


def cache_prompts(llm: LLM, policy: ShapePolicy, prompts: list[list[int]]) -> None:
    """From here on the prompts are in the prefix cache."""
    with under(llm, policy):
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1))


def measure_policies(
    llm: LLM, policies: Mapping[str, ShapePolicy], load: Load, repeats: int
) -> dict[str, dict[str, Any]]:
    """This many rounds, in which every policy has its turn that is not far after. The controller has one before, to
    learn what a server that runs has learned."""
    run_load(llm, policies["adaptive"], load, repeats)
    rows: dict[str, list[Run]] = {name: [] for name in policies}
    for turn in range(repeats):
        best = max((runs[0].rate for runs in rows.values() if runs), default=0.0)
        for name, policy in policies.items():
            if not turn or name in ("off", "adaptive") or rows[name][0].rate >= FAR_BEHIND * best:
                rows[name].append(run_load(llm, policy, load, turn))
    return {name: summary(runs) for name, runs in rows.items()}


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Of a policy's runs together. ``stepping`` and ``prefill``: the shares of the time that the device worked on
    either; ``while_stepping``: tokens a second of the first alone."""
    steps = [step for run in runs for step in run.steps]
    seconds, stepping = sum(run.seconds for run in runs), sum(step.seconds for step in steps)
    return {
        "runs": len(runs),
        "tokens_per_second": sum(run.tokens for run in runs) / seconds,
        "while_stepping": sum(step.emitted for step in steps) / stepping,
        "stepping": stepping / seconds,
        "prefill": sum(run.prefill for run in runs) / seconds,
        "accepted_length": accepted_length(steps),
        "shapes": by_shape(steps),
    }


def best_of(rows: Mapping[str, dict[str, Any]], figure: str = "tokens_per_second") -> str:
    """The best of those that always run one shape and had all turns."""
    rivals = [name for name, row in rows.items() if name != "adaptive" and row["runs"] == rows["off"]["runs"]]
    return max(rivals, key=lambda name: float(rows[name][figure]))


def still_worth(policies: Mapping[str, ShapePolicy], rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """What larger batches are measured with: without shapes that have more nodes than the best one and are a fifth
    slower, for nodes grow dearer with the batch."""
    best = best_of(rows)

    def nodes(name: str) -> int:
        return int(name.split(",")[-1]) if "," in name else 1

    def kept(name: str) -> bool:
        if name == "adaptive" or nodes(name) <= nodes(best):
            return True
        return bool(rows[name]["tokens_per_second"] >= 0.8 * rows[best]["tokens_per_second"])

    return [name for name in policies if kept(name)]


def row_line(row: Figures) -> str:
    """The controller against the best of the others, by the clock and by the device time of steps; then each policy."""
    policies = row["policies"]
    ratios: dict[str, float] = {}
    for figure in ("tokens_per_second", "while_stepping"):
        ours, best = policies["adaptive"][figure], best_of(policies, figure)
        ratios |= {f"{figure} / {name}": ours / policies[name][figure] for name in (best, "off")}
    chosen = {shape: each["steps"] for shape, each in list(policies["adaptive"]["shapes"].items())[:3]}
    lines = [f"  {name:8} {line(each)}" for name, each in policies.items()]
    return "\n".join([f"{line(row)}  {line(ratios)}  chose {chosen}", *lines])


def main() -> None:
    """The controller against every fixed shape and plain decoding, in tokens per second by batch size.

        python -m benchmarks.adaptive --model DIR/target --eagle3 DIR/eagle3 [--batches 1 2 4 8] [--repeats 2]

    DIR is the output of ``python -m benchmarks.cost_faithful``; ``--eagle3 DIR/eagle3_useless`` is a draft that is
    never right. One engine runs all policies in turns, so that a machine that slows down affects all alike. Fixed
    shapes are forced upon its scheduler; the controller keeps what it learned from one batch size to the next, as
    in a server. With ``--rates``, such as those of ``golden_acceptance.json``, acceptance is drawn, and ``allowed``
    is the most that drafting can gain over plain decoding if a step's time were the bytes of weights that it reads.
    All requests are greedy; in 16 bits near-ties make some texts diverge. Each turn continues in the prompts where
    the last one ended. A fixed shape that is far behind the best in the first turn gets no other. Batches are kept
    full: when a request ends the next begins, with its prompt in the prefix cache. Tokens per second are by the wall
    clock; they include the time to start a request, but not its first token.
    ``while_stepping`` is by the device time of steps, which is what the controller can influence. Answers have half
    to all of ``--new-tokens``.
    """
    parser = load_options(main.__doc__)
    parser.set_defaults(repeats=2)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--shapes", nargs="*", type=parse_shape, default=STATIC, help="not set: all")
    parser.add_argument("--rates", help="as --speculative-synthetic-acceptance, by level")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    words = "--mamba-full-memory-ratio, to cache all prompts: more than two snapshots for each"
    parser.add_argument("--states-ratio", type=float, help=words)
    add_requests(parser)
    args = parse_load(parser)
    drawn = {"speculative_synthetic_acceptance": args.rates, "load_format": args.load_format}
    drawn |= {"mamba_full_memory_ratio": args.states_ratio} if args.states_ratio else {}
    sizes = [size for size in args.batches if size <= args.max_batch]
    prompts = make_prompts(args, max(*sizes, min(args.max_batch, PROMPTS)))
    # A prompt whose last page is whole has no snapshot where that page begins.
    prompts = [prompt[:-1] for prompt in prompts]

    def rows() -> Iterator[Figures]:
        with adaptive_llm(args, max(sizes), args.shapes, **drawn) as (llm, policies):
            cache_prompts(llm, policies["off"], prompts)
            weights = Weights.of(scheduler_of(llm).runner.context)
            for size in sizes:
                figures = measure_policies(llm, policies, Load.of(args, prompts, size), args.repeats)
                known = args.rates and not args.token_map  # a whole head is counted
                rates = [float(rate) for rate in args.rates.split(",")] if known else None
                yield {
                    "batch": size,
                    "allowed": None if rates is None else weights.most_gain(rates, size),
                    "policies": figures,
                }
                policies = {name: policies[name] for name in still_worth(policies, figures)}

    keep_rows("adaptive", rows(), args.output, row_line)


def add_requests(parser: argparse.ArgumentParser) -> None:
    text = "of each turn, at least; twice the batch if that is more"
    parser.add_argument("--requests", type=int, default=12, help=text)


LONG_SHAPES: tuple[Speculation, ...] = ((1, 1, 2), (2, 1, 3), (3, 1, 4), (5, 1, 6), (4, 4, 8))
ACCEPTANCE = {"natural": NONE, "three": 2}
"""Draft levels that are accepted by force."""


@contextmanager
def longer_contexts(tokens: int) -> Iterator[None]:
    """Models take contexts of this many tokens, whatever they were trained for; the text is of no interest."""
    load = specserve.models.read_config.load_model_config

    def stretched(*paths: Path) -> ModelConfig:
        config = load(*paths)
        return replace(config, max_position_embeddings=max(tokens, config.max_position_embeddings))

    with patch.object(specserve.models.read_config, "load_model_config", stretched):
        yield


def run_long(
    args: argparse.Namespace, sizes: Sequence[int], shapes: Sequence[Speculation]
) -> Iterator[Figures]:
    """All batches with both kinds of acceptance."""
    if args.prompts == "random":
        prompts = random_prompts(used_tokens(args.model), max(sizes), args.prompt_tokens)
    else:
        prompts = make_prompts(args, max(sizes))
    engine = adaptive_llm(args, max(sizes), shapes, min(sizes), kv_cache_dtype=args.kv_cache_dtype)
    with (
        longer_contexts(args.prompt_tokens + args.new_tokens),
        forced_levels() as force,
        engine as (llm, policies),
    ):
        cache_prompts(llm, policies["off"], prompts)
        for size, (name, levels) in product(sizes, ACCEPTANCE.items()):
            force(levels)
            figures = measure_policies(llm, policies, Load.of(args, prompts, size), args.repeats)
            yield {"batch": size, "acceptance": name, "policies": figures}


def long_context() -> None:
    """Long contexts: 64 requests of 8,192 random tokens each, by shape and under the controller.

        python -m benchmarks.adaptive long_context --model DIR/target --eagle3 DIR/eagle3 [--batches 16 64]
            [--requests 12] [--shapes 3,1,4] [--kv-cache-dtype fp8_e4m3]

    DIR is the output of ``python -m benchmarks.cost_faithful``. Reading the caches takes most of a step, and its
    cost does not depend on how many tokens a step gives. Everything is measured twice: with the pair's own
    acceptance on such contexts, and with three tokens per step (two levels accepted by force, and the bonus token;
    fewer if a shape has one level or a limit is near). Contexts are prefilled once and stay in the prefix cache;
    batches are kept full, as without ``long_context``.
    """
    parser = load_options(long_context.__doc__)
    parser.set_defaults(prompts="random", prompt_tokens=8192, repeats=1)
    parser.add_argument("--new-tokens", type=int, default=128)
    add_requests(parser)
    parser.add_argument("--batches", nargs="+", type=int, default=[64])
    parser.add_argument("--shapes", nargs="*", type=parse_shape, default=LONG_SHAPES, help="not set: all")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto")
    args = parse_load(parser)
    if args.quick:
        args.batches, args.requests, args.new_tokens, args.shapes = [2], 4, 10, LONG_SHAPES[1:3]
    sizes = [size for size in args.batches if size <= args.max_batch]
    keep_rows("long_context", run_long(args, sizes, args.shapes), args.output, row_line)


DRAFTS: dict[str, Callable[[Path], Path] | None] = {
    "NGRAM": None,
    "SUFFIX": None,
    "LOOKAHEAD": None,
    "MEDUSA": lambda path: make_medusa(path / "draft", BUNDLED_MODEL),
    "HYDRA": lambda path: make_hydra(path / "draft", BUNDLED_MODEL),
    "MLP_SPECULATOR": lambda path: make_mlp_speculator(path / "draft", BUNDLED_MODEL),
    "ARCTIC_LSTM": lambda path: make_arctic_lstm(path / "draft", BUNDLED_MODEL),
    "REDRAFTER": lambda path: make_redrafter(path / "draft", BUNDLED_MODEL),
    "STANDALONE": lambda path: small_model(path / "draft"),
    "P_EAGLE": lambda path: make_p_eagle(path / "draft", BUNDLED_MODEL),
    "PARD": lambda path: make_pard(path / "draft", small_model(path / "model"), 3),
}


def small_model(path: Path) -> Path:
    return make_llama(path, vocab=4096, hidden=128, inner=256, layers=2, heads=4, kv_heads=2, head_dim=32)


def kept(run: Run) -> tuple[float, float]:
    """Seconds of the run's steps, and those among them that drafting lost."""
    plain = median(step.seconds for step in run.steps if step.shape == "off")
    lost = sum(
        step.seconds - step.emitted / step.requests * plain for step in run.steps if step.shape != "off"
    )
    return sum(step.seconds for step in run.steps), lost


def measure(method: str, args: argparse.Namespace, folder: Path) -> None:
    make = DRAFTS[method]
    draft: dict[str, Any] = {"speculative_draft_model_path": None if make is None else str(make(folder))}
    prompts = make_prompts(args, 16)
    with adaptive_llm(args, 1, fixed=(), speculative_algorithm=method, **draft) as (llm, policies):
        cache_prompts(llm, policies["off"], prompts)
        load = replace(Load.of(args, prompts, 1), temperature=1.6 if make is None else 0.0)
        run_load(llm, policies["adaptive"], load)  # it may learn what a server that runs has learned
        runs = [run_load(llm, policies["adaptive"], load, 1 + turn) for turn in range(args.repeats)]
    seconds, lost = (sum(column) for column in zip(*map(kept, runs), strict=True))
    steps = [step for run in runs for step in run.steps]
    print(f"{method:15} kept {1 - lost / seconds:.3f}  {by_shape(steps)}", flush=True)


def never_right() -> None:
    """The controller's loss when drafts are never right, by method: ``python -m benchmarks.adaptive never_right``.

    The bundled model with one request at a time. Heads and models have random weights; lookups get text drawn at
    temperature 1.6, which never repeats. *Kept* is the share of the steps' time that remains after subtracting the
    time lost in drafted steps, compared with the median of the run's plain steps. Both are measured in one run, in
    the processor time of one thread, so that other work on the machine matters little. 1 is plain decoding.
    """
    parser = options(never_right.__doc__, output=False)
    parser.add_argument("--methods", nargs="+", choices=list(DRAFTS), default=list(DRAFTS))
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    time.perf_counter = time.process_time
    fixed: dict[str, Any] = {"prompts": "heldout", "prompt_tokens": 64, "new_tokens": 200, "requests": 3}
    args = argparse.Namespace(
        model=str(BUNDLED_MODEL), eagle3=None, dtype="auto", repeats=chosen.repeats, **fixed
    )
    for method in chosen.methods:
        with tempfile.TemporaryDirectory() as folder:
            measure(method, args, Path(folder))


if __name__ == "__main__":
    run_command(main, never_right, long_context)
