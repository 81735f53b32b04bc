"""The controller against every fixed shape and against plain decoding, tokens a second by batch size.

    python -m benchmarks.adaptive --model DIR/target --eagle3 DIR/eagle3 [--batches 1 2 4 8] [--repeats 2]

DIR is the output of ``python -m benchmarks.cost_faithful``; ``--eagle3 DIR/eagle3_useless`` is a draft that is never
right. One engine runs all of them, in turns, so that a machine that slows down slows all alike: fixed shapes are forced
upon its scheduler, and the controller keeps what it learned from one batch size to the next, as in a server.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from unittest.mock import patch

import specserve.engine.build
from benchmarks.common import generate_timed, load_options, make_prompts, parse_load, write_results
from specserve import LLM
from specserve.engine.shapes import ShapePlan, ShapePolicy, Speculation, StaticShapes, step_shape
from specserve.spec.adaptive import Batch
from specserve.spec.cost import CostModel
from specserve.spec.tree import StepShape

STATIC: tuple[Speculation, ...] = ((1, 1, 2), (2, 1, 3), (3, 1, 4), (5, 1, 6), (4, 4, 16), (5, 8, 32))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SEED_RATIOS = {"NAIVE_EAGLE": 0.68 / 0.62, "EAGLE": 0.52 / 0.62}
"""Tokens a second with and without speculation, batch 64, as the issue that began this project had them."""


@dataclass(frozen=True, slots=True)
class WiderPlan(ShapePlan):
    """Has ``fixed`` shapes too, for batches of at least ``smallest``."""

    fixed: tuple[Speculation, ...] = STATIC
    smallest: int = 1

    def shapes(self) -> list[StepShape]:
        sizes = [size for size in self.padding.buckets or (self.most_slots,) if size >= self.smallest]
        fixed = [step_shape(size, each, size) for size in sizes for each in self.fixed]
        return list(dict.fromkeys([*ShapePlan.shapes(self), *fixed]))


@dataclass(slots=True)
class Counted:
    """A policy, and how often it chose each kind of shape."""

    policy: ShapePolicy
    chosen: Counter[str] = field(default_factory=Counter)

    @property
    def cost(self) -> CostModel | None:
        return self.policy.cost

    def choose(self, batch: Batch) -> StepShape:
        shape = self.policy.choose(batch)
        self.chosen[name_of(shape)] += 1
        return shape

    def plain(self, slots: int) -> StepShape:
        return self.policy.plain(slots)

    def observe(self, *what: Any) -> None:
        self.policy.observe(*what)


def name_of(shape: StepShape) -> str:
    """Levels, branching and the nodes that a slot has on average."""
    if not shape.levels:
        return "off"
    return f"{shape.levels},{shape.branching},{shape.nodes / shape.slots:.3g}"


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
    plan_of = specserve.engine.build.shape_plan

    def wider(settings: Any) -> WiderPlan:
        plan = plan_of(settings)
        fields = plan.speculation, plan.adaptive, plan.most_slots, plan.padding
        made.append(WiderPlan(*fields, tuple(fixed), smallest))
        return made[-1]

    given: dict[str, Any] = {
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "max_running_requests": batch,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": args.eagle3,
        "speculative_adaptive": True,
    }
    with (
        patch.object(specserve.engine.build, "shape_plan", wider),
        LLM(args.model, **given | settings) as llm,
    ):
        assert llm._engine is not None
        padding = made[-1].padding
        policies: dict[str, ShapePolicy] = {"off": StaticShapes(None, padding)}
        policies |= {spelled(each): StaticShapes(each, padding) for each in fixed}
        yield llm, policies | {"adaptive": llm._engine._policy}


def spelled(speculation: Speculation) -> str:
    """Levels, branching, and the nodes that a slot has of the budget."""
    return ",".join(map(str, speculation))


@contextmanager
def under(llm: LLM, policy: ShapePolicy) -> Iterator[None]:
    """The engine's steps have the shapes of ``policy``; it is told of all of them before the next one rules."""
    engine = llm._engine
    assert engine is not None
    before, engine._policy = engine._policy, policy
    try:
        yield
    finally:
        while engine.has_work:
            engine.run_once()
        engine._policy = before


def run_once(
    llm: LLM, policy: ShapePolicy, prompts: list[list[int]], new_tokens: int
) -> tuple[float, float, Counter[str]]:
    """Tokens a second without prefill, tokens a step, and the shapes that ran."""
    counted = Counted(policy)
    with under(llm, counted):
        prefill, _ = generate_timed(llm, prompts, 1)
        counted.chosen.clear()
        whole, outputs = generate_timed(llm, prompts, new_tokens)
    each = [output.speculation for output in outputs]
    steps = sum(s.steps for s in each)
    emitted = steps + sum(s.accepted for s in each)
    return emitted / (whole - prefill), emitted / steps, counted.chosen


def measure(
    llm: LLM, policies: dict[str, ShapePolicy], prompts: list[list[int]], new_tokens: int, repeats: int
) -> dict[str, dict[str, Any]]:
    """Medians over rounds in which every policy has its turn."""
    rows: dict[str, list[tuple[float, float, Counter[str]]]] = {name: [] for name in policies}
    for _ in range(repeats):
        for name, policy in policies.items():
            rows[name].append(run_once(llm, policy, prompts, new_tokens))
    return {
        name: {
            "tokens_per_second": median(rate for rate, *_ in found),
            "accepted_length": median(length for _, length, _ in found),
            "chosen": dict(sum((chosen for *_, chosen in found), Counter[str]()).most_common()),
        }
        for name, found in rows.items()
    }


def line(batch: int, found: dict[str, dict[str, Any]]) -> str:
    """Tokens a second of all, and what the controller is held against."""
    rates = {name: row["tokens_per_second"] for name, row in found.items()}
    best = max((name for name in rates if name != "adaptive"), key=lambda name: rates[name])
    ours, top = rates["adaptive"], list(found["adaptive"]["chosen"].items())[:3]
    return (
        f"{batch:5} "
        + " ".join(f"{rate:9.0f}" for rate in rates.values())
        + f" {ours / rates[best]:6.3f} {ours / rates['off']:6.3f}  best {best}; chose {top}"
    )


def header(policies: Sequence[str]) -> str:
    return f"{'batch':>5} " + " ".join(f"{name:>9}" for name in policies) + f" {'/best':>6} {'/off':>6}"


def main() -> None:
    parser = load_options(__doc__)
    parser.set_defaults(repeats=1)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    args = parse_load(parser)
    sizes = [size for size in args.batches if size <= args.max_batch]
    prompts = make_prompts(args, max(sizes))
    rows = []
    with adaptive_llm(args, max(sizes)) as (llm, policies):
        print(header(list(policies)))
        for size in sizes:
            for (
                name,
                policy,
            ) in policies.items():  # the controller may learn what a server that runs has learned
                run_once(llm, policy, prompts[:size], args.new_tokens if name == "adaptive" else 8)
            found = measure(llm, policies, prompts[:size], args.new_tokens, args.repeats)
            rows.append({"batch": size, "policies": found})
            print(line(size, found), flush=True)
    seeds = ", ".join(f"{name} {ratio:.2f}" for name, ratio in SEED_RATIOS.items())
    print(f"with / without speculation that this project was begun for: {seeds}")
    print(write_results("adaptive", rows, args.output))


if __name__ == "__main__":
    main()
