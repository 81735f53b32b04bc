"""The controller against every fixed shape and plain decoding, in tokens per second by batch size.

    python -m benchmarks.adaptive --model DIR/target --eagle3 DIR/eagle3 [--batches 1 2 4 8] [--repeats 2]

DIR is the output of ``python -m benchmarks.cost_faithful``; ``--eagle3 DIR/eagle3_useless`` is a draft that is never
right. One engine runs all policies in turns, so that a machine that slows down affects all alike. Fixed shapes are
forced upon its scheduler; the controller keeps what it learned from one batch size to the next, as in a server. All
requests are greedy; in 16 bits near-ties make some texts diverge. Each turn continues in the prompts where the last one
ended. A fixed shape that is far behind the best in the first turn, marked ``-``, gets no other. Batches are kept full:
when a request ends the next begins, with its prompt in the prefix cache. Tokens per second are by the wall clock; they
include the time to start a request, but not its first token. The last two columns are by the device time of steps,
which is what the controller can influence. Answers have half to all of ``--new-tokens``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import specserve.process.assemble
from benchmarks.closed_loop import ClosedLoop, Step, endless
from benchmarks.common import load_options, make_prompts, parse_load, write_results
from specserve import LLM, SamplingParams
from specserve.engine.shapes import ShapePlan, ShapePolicy, Speculation, StaticShapes, step_shape
from specserve.speculation.shape import StepShape
from specserve.tools.tune.loop import MeteredRunner

STATIC: tuple[Speculation, ...] = ((1, 1, 2), (2, 1, 3), (3, 1, 4), (5, 1, 6), (4, 4, 16), (5, 8, 32))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = 64  # at least, however small the batches
FAR_BEHIND = 0.85  # of the best rate
SEED_RATIOS = {"NAIVE_EAGLE": 0.68 / 0.62, "EAGLE": 0.52 / 0.62}
"""Tokens a second with and without speculation, batch 64, as the issue that began this project had them."""


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

    given: dict[str, Any] = {
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
        "max_running_requests": batch,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": args.eagle3,
        "speculative_adaptive": True,
    }
    with (
        patch.object(specserve.process.assemble, "shape_plan", wider),
        patch.object(specserve.process.assemble, "Runner", MeteredRunner),
        LLM(args.model, **given | settings) as llm,
    ):
        assert llm.engine is not None
        padding = made[-1].padding
        policies: dict[str, ShapePolicy] = {"off": StaticShapes(None, padding)}
        policies |= {spelled(each): StaticShapes(each, padding) for each in fixed}
        yield llm, policies | {"adaptive": llm.engine.policy}


def spelled(speculation: Speculation) -> str:
    """Levels, branching, and the nodes that a slot has of the budget."""
    return ",".join(map(str, speculation))


@contextmanager
def under(llm: LLM, policy: ShapePolicy) -> Iterator[None]:
    """The engine's steps have the shapes of ``policy``; it is told of all of them before the next one rules."""
    engine = llm.engine
    assert engine is not None
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
    assert llm.engine is not None
    runner = llm.engine.runner
    assert isinstance(runner, MeteredRunner)
    first = turn * (load.batch + load.requests)
    jobs = {"": endless(load.prompts, load.new_tokens, first, temperature=0.0, ignore_eos=True)}
    wanted = {"": load.batch}
    with ClosedLoop(llm.engine, policy, jobs) as loop:
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


def measure(
    llm: LLM, policies: Mapping[str, ShapePolicy], load: Load, repeats: int
) -> dict[str, dict[str, Any]]:
    """This many rounds, in which every policy has its turn that is not far after."""
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


def best_of(found: Mapping[str, dict[str, Any]], figure: str = "tokens_per_second") -> str:
    """The best of those that always run one shape and had all turns."""
    rivals = [
        name for name, row in found.items() if name != "adaptive" and row["runs"] == found["off"]["runs"]
    ]
    return max(rivals, key=lambda name: float(found[name][figure]))


def still_worth(policies: Mapping[str, ShapePolicy], found: Mapping[str, dict[str, Any]]) -> list[str]:
    """What larger batches are measured with: without shapes that have more nodes than the best one and are a fifth
    slower, for nodes grow dearer with the batch."""
    best = best_of(found)

    def nodes(name: str) -> int:
        return int(name.split(",")[-1]) if "," in name else 1

    def kept(name: str) -> bool:
        if name == "adaptive" or nodes(name) <= nodes(best):
            return True
        return bool(found[name]["tokens_per_second"] >= 0.8 * found[best]["tokens_per_second"])

    return [name for name in policies if kept(name)]


def line(batch: int, found: Mapping[str, dict[str, Any]], names: Sequence[str]) -> str:
    """Tokens a second of all, and what the controller is held against."""
    rates = {name: row["tokens_per_second"] for name, row in found.items()}
    stepping = {name: row["while_stepping"] for name, row in found.items()}
    turns = {name: row["runs"] for name, row in found.items()}
    best, quickest = best_of(found), best_of(found, "while_stepping")
    chosen = {shape: row["steps"] for shape, row in found["adaptive"]["shapes"].items()}
    ours, top = rates["adaptive"], list(chosen.items())[:3]
    return (
        f"{batch:5} "
        + " ".join(
            _cell(rates[name], turns[name] < turns["off"]) if name in rates else f"{'':9}" for name in names
        )
        + f" {ours / rates[best]:6.3f} {ours / rates['off']:6.3f}"
        + f" {stepping['adaptive'] / stepping[quickest]:8.3f} {stepping['adaptive'] / stepping['off']:8.3f}"
        + f"  best {best}; chose {top}"
    )


def _cell(rate: float, dropped: bool) -> str:
    return f"{f'{rate:.0f}-' if dropped else f'{rate:.0f}':>9}"


def header(policies: Sequence[str]) -> str:
    columns = f" {'/best':>6} {'/off':>6} {'stepping':>8} {'/off':>8}"
    return f"{'batch':>5} " + " ".join(f"{name:>9}" for name in policies) + columns


def main() -> None:
    parser = load_options(__doc__)
    parser.set_defaults(repeats=2)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--shapes", nargs="*", choices=list(map(spelled, STATIC)), help="not set: all")
    add_requests(parser)
    args = parse_load(parser)
    sizes = [size for size in args.batches if size <= args.max_batch]
    prompts = make_prompts(args, max(*sizes, min(args.max_batch, PROMPTS)))
    fixed = [each for each in STATIC if args.shapes is None or spelled(each) in args.shapes]
    rows = []
    with adaptive_llm(args, max(sizes), fixed) as (llm, policies):
        cache_prompts(llm, policies["off"], prompts)
        names = list(policies)
        print(header(names))
        for size in sizes:
            load = Load.of(args, prompts, size)
            # It may learn what a server that runs has learned.
            run_load(llm, policies["adaptive"], load, args.repeats)
            found = measure(llm, policies, load, args.repeats)
            rows.append({"batch": size, "policies": found})
            print(line(size, found, names), flush=True)
            written = write_results("adaptive", rows, args.output)  # each time: a run may be cut short
            policies = {name: policies[name] for name in still_worth(policies, found)}
    seeds = ", ".join(f"{name} {ratio:.2f}" for name, ratio in SEED_RATIOS.items())
    print(f"with / without speculation that this project was begun for: {seeds}")
    print(written)


def add_requests(parser: argparse.ArgumentParser) -> None:
    text = "of each turn, at least; twice the batch if that is more"
    parser.add_argument("--requests", type=int, default=12, help=text)


if __name__ == "__main__":
    main()
