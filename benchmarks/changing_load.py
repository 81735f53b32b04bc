"""A changing load: from 1 to 128 requests and back, in stages of code, dialogue and random text.

    python -m benchmarks.changing_load --model DIR/target --eagle3 DIR/eagle3 [--seconds 2] [--plot PNG]

DIR is the output of ``python -m benchmarks.cost_faithful``. The scenario runs under plain decoding, the best fixed
shape (``--fixed``) and the controller, in turns, with the same prompts and seeds. When a request ends the next begins.
Tokens per second are by the wall clock, prefill included. Code and dialogue are greedy; random text is random tokens
continued at temperature 2. Of the steps, only windows are kept.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.adaptive import adaptive_llm, spelled
from benchmarks.closed_loop import ClosedLoop, Delivery, Jobs, Step, endless
from benchmarks.common import (
    load_options,
    load_prompts,
    parse_load,
    random_prompts,
    used_tokens,
    write_results,
)
from benchmarks.plots import plot_changing_load
from specserve import LLM
from specserve.engine.shapes import ShapePolicy
from specserve.frontend.tokenizer import Tokenizer

STAGES = (1, 8, 32, 128, 32, 8, 1)
FIXED = (3, 1, 4)
SAMPLING: dict[str, dict[str, Any]] = {
    "code": {"temperature": 0.0, "ignore_eos": True},
    "dialogue": {"temperature": 0.0},
    "random": {"temperature": 2.0, "top_k": 50, "ignore_eos": True},
}
"""By kind of text; dialogues end by themselves. Hotter, or without top_k, random text is drafted better, not worse:
what counts is the noise then, and draft and target draw the same."""
KINDS = tuple(SAMPLING)


def prompts_by_kind(args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Held-out code and dialogues, and random ids of the range that these use."""
    tokenizer, rows = Tokenizer.load(args.model), load_prompts()
    code = [tokenizer.encode(row["prompt"]) for row in rows if "prompt" in row]
    dialogue = [tokenizer.encode_chat(row["messages"]) for row in rows if "messages" in row]
    return {"code": code, "dialogue": dialogue, "random": random_prompts(used_tokens(args.model), 50, 64)}


@dataclass(frozen=True, slots=True)
class Stage:
    """A number of requests of one kind, from one second to another."""

    requests: int
    kind: str
    begin: float
    end: float


def run_scenario(
    llm: LLM, policy: ShapePolicy, jobs: Jobs, stages: Sequence[int], seconds: float
) -> tuple[list[Stage], list[Step], list[Delivery]]:
    """All stages, one after the other. Requests of a stage that has ended run to their ends."""
    assert llm.engine is not None
    ran = []
    with ClosedLoop(llm.engine, policy, jobs) as loop:
        for requests in stages:
            for kind in KINDS:
                begin = loop.now()
                loop.run({kind: requests}, seconds)
                ran.append(Stage(requests, kind, begin, loop.now()))
        return ran, list(loop.steps), list(loop.deliveries)


def summarize(
    begin: float, end: float, steps: Sequence[Step], deliveries: Sequence[Delivery]
) -> dict[str, Any]:
    """What happened between two times."""
    inside = [step for step in steps if begin <= step.at < end]
    requests = sum(step.requests for step in inside)
    tokens = sum(each.tokens for each in deliveries if begin <= each.at < end)
    return {
        "begin": round(begin, 3),
        "end": round(end, 3),
        "tokens_per_second": round(tokens / (end - begin), 1),
        "accepted_length": round(sum(step.emitted for step in inside) / requests, 3) if requests else None,
        "running": round(requests / len(inside), 1) if inside else 0,
        "shapes": dict(Counter(step.shape for step in inside).most_common()),
    }


def windows(width: float, steps: Sequence[Step], deliveries: Sequence[Delivery]) -> list[dict[str, Any]]:
    """Of equal width, as many whole ones as there are."""
    whole = int(max(each.at for each in deliveries) // width)
    steps_in: list[list[Step]] = [[] for _ in range(whole + 1)]
    deliveries_in: list[list[Delivery]] = [[] for _ in range(whole + 1)]
    for step in steps:
        steps_in[min(int(step.at // width), whole)].append(step)
    for each in deliveries:
        deliveries_in[min(int(each.at // width), whole)].append(each)
    return [summarize(i * width, (i + 1) * width, steps_in[i], deliveries_in[i]) for i in range(whole)]


def measure(
    llm: LLM,
    policies: Mapping[str, ShapePolicy],
    prompts: dict[str, list[list[int]]],
    args: argparse.Namespace,
) -> dict[str, dict[str, Any]]:
    """Rounds in which every policy has its turn: medians of the stages, and the windows of the last round."""
    found: dict[str, dict[str, Any]] = {name: {"rounds": []} for name in policies}
    for _ in range(args.repeats):
        for name, policy in policies.items():
            jobs = {kind: endless(prompts[kind], args.new_tokens, **SAMPLING[kind]) for kind in KINDS}
            stages, *records = run_scenario(llm, policy, jobs, args.stages, args.seconds)
            rows = [
                {"requests": s.requests, "kind": s.kind, **summarize(s.begin, s.end, *records)}
                for s in stages
            ]
            found[name]["rounds"].append(rows)
            found[name]["windows"] = windows(args.window, *records)
    return found


def stage_lines(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Tokens a second of each stage, ratios to plain decoding, what the controller chose."""
    names = list(found)
    yield f"{'requests':>8} {'text':9}" + "".join(f"{name:>10}" for name in names) + f"{'/off':>7}  chose"
    for index, row in enumerate(found["adaptive"]["rounds"][-1]):
        rates = {
            name: median(rows[index]["tokens_per_second"] for rows in each["rounds"])
            for name, each in found.items()
        }
        ratio = rates["adaptive"] / rates["off"] if rates["off"] else float("nan")
        top = ", ".join(f"{shape} x{times}" for shape, times in list(row["shapes"].items())[:3])
        line = "".join(f"{rate:10.0f}" for rate in rates.values())
        yield f"{row['requests']:8} {row['kind']:9}{line}{ratio:7.2f}  {top}"


def warm_up(
    llm: LLM, policies: Mapping[str, ShapePolicy], prompts: Sequence[list[int]], most: int, seconds: float
) -> None:
    """Kernels compile, and pinned memory grows, before anything is timed."""
    assert llm.engine is not None
    for name, policy in policies.items():
        if name != "adaptive":  # which learns from what it runs
            jobs = {"code": endless(prompts, 16, temperature=0.0)}
            with ClosedLoop(llm.engine, policy, jobs) as loop:
                loop.run({"code": most}, seconds)


def main() -> None:
    parser = load_options(__doc__)
    parser.set_defaults(repeats=1)
    parser.add_argument("--new-tokens", type=int, default=128, help="at most, of a request")
    parser.add_argument("--stages", nargs="+", type=int, default=list(STAGES))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each stage and kind of text")
    parser.add_argument("--window", type=float, default=0.25, help="seconds")
    parser.add_argument("--fixed", nargs=3, type=int, default=FIXED, metavar=("STEPS", "TOPK", "TOKENS"))
    parser.add_argument("--plot", type=Path, help="draw the result into this file")
    args = parse_load(parser)
    if args.quick:
        args.stages, args.seconds, args.new_tokens = [1, 4, 1], min(args.seconds, 1.0), 16
    steps, topk, tokens = args.fixed
    prompts, most = prompts_by_kind(args), max(args.stages)
    with adaptive_llm(args, most, fixed=[(steps, topk, tokens)]) as (llm, policies):
        warm_up(llm, policies, prompts["code"], most, min(args.seconds, 0.5))
        found = measure(llm, policies, prompts, args)
    for line in stage_lines(found):
        print(line, flush=True)
    figures = {"fixed": spelled((steps, topk, tokens)), "policies": found}
    print(write_results("changing_load", figures, args.output))
    if args.plot:
        plot_changing_load(figures, args.plot)
        print(args.plot)


if __name__ == "__main__":
    main()
