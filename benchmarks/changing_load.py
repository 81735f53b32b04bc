"""The controller under loads that are not uniform: changing and mixed."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.adaptive import (
    adaptive_llm,
    spelled,
    under,
)
from benchmarks.closed_loop import ClosedLoop, Delivery, Jobs, Step, endless
from benchmarks.common import (
    drawn,
    encode,
    load_options,
    load_prompts,
    parse_load,
    random_prompts,
    scheduler_of,
    used_tokens,
)
from benchmarks.results import Figures, line, medians, run_command, show, write_results
from specserve import LLM, SamplingParams
from specserve.core import MAX_BIAS
from specserve.core import Speculation as RequestSpeculation
from specserve.engine.shapes import ShapePolicy, Speculation
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
    return {
        "code": [encode(tokenizer, row) for row in rows if "prompt" in row],
        "dialogue": [encode(tokenizer, row) for row in rows if "messages" in row],
        "random": random_prompts(used_tokens(args.model), 50, 64),
    }


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
    ran = []
    with ClosedLoop(scheduler_of(llm), policy, jobs) as loop:
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
    figures: dict[str, dict[str, Any]] = {name: {"rounds": []} for name in policies}
    for _ in range(args.repeats):
        for name, policy in policies.items():
            jobs = {kind: endless(prompts[kind], args.new_tokens, **SAMPLING[kind]) for kind in KINDS}
            stages, steps, deliveries = run_scenario(llm, policy, jobs, args.stages, args.seconds)
            rows = [
                {"requests": s.requests, "kind": s.kind, **summarize(s.begin, s.end, steps, deliveries)}
                for s in stages
            ]
            figures[name]["rounds"].append(rows)
            figures[name]["windows"] = windows(args.window, steps, deliveries)
    return figures


def stage_rows(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[Figures]:
    """Tokens a second of each stage by policy, and what the controller chose in its last round."""
    for index, last in enumerate(figures["adaptive"]["rounds"][-1]):
        rates = {
            name: median(rows[index]["tokens_per_second"] for rows in each["rounds"])
            for name, each in figures.items()
        }
        chosen = ", ".join(f"{shape} x{times}" for shape, times in list(last["shapes"].items())[:3])
        yield {"requests": last["requests"], "kind": last["kind"], **rates, "chosen": chosen}


def warm_up(
    llm: LLM, policies: Mapping[str, ShapePolicy], prompts: Sequence[list[int]], most: int, seconds: float
) -> None:
    """Kernels compile, and pinned memory grows, before anything is timed."""
    for name, policy in policies.items():
        if name != "adaptive":  # which learns from what it runs
            jobs = {"code": endless(prompts, 16, temperature=0.0)}
            with ClosedLoop(scheduler_of(llm), policy, jobs) as loop:
                loop.run({"code": most}, seconds)


KIND_COLORS = {"code": "tab:blue", "dialogue": "tab:green", "random": "tab:red"}


def plot(figures: dict[str, Any], path: Path) -> None:
    """Over time: requests, the controller's shapes, accepted length and tokens a second, its and plain decoding's.
    After them the stages, a colour a kind of text, the darker the more requests."""
    ours, off = figures["policies"]["adaptive"], figures["policies"]["off"]
    heights = {"height_ratios": [1, 2, 1, 2]}
    with drawn(path, 4, figsize=(12, 10), sharex=True, gridspec_kw=heights) as (_, axes):
        for axis in axes:
            _stage_bands(axis, ours["rounds"][-1])
            axis.grid(alpha=0.3)
        axes[0].set_yscale("log", base=2)
        axes[0].yaxis.set_major_formatter("{x:.0f}")
        axes[0].set_xlim(0, ours["rounds"][-1][-1]["end"])
        _line(axes[0], ours["windows"], "running", "C0", None)
        _shape_marks(axes[1], ours["windows"])
        _line(axes[2], ours["windows"], "accepted_length", "C0", None)
        axes[3].set_yscale("log")
        _line(axes[3], ours["windows"], "tokens_per_second", "C0", "adaptive")
        _line(axes[3], off["windows"], "tokens_per_second", "black", "off")
        names = ("requests", "shape: levels,\nbranching,nodes a slot", "accepted\nlength", "tokens a second")
        for axis, name in zip(axes, names, strict=True):
            axis.set_ylabel(name)
        handles = [axes[0].axvspan(0, 0, color=color, alpha=0.3) for color in KIND_COLORS.values()]
        axes[0].legend(handles, list(KIND_COLORS), loc="upper right")
        axes[3].legend(loc="upper right")
        axes[3].set_xlabel("seconds")


def _stage_bands(axes: Any, stages: Sequence[Figures]) -> None:
    most = max(stage["requests"] for stage in stages)
    for stage in stages:
        alpha = 0.05 + 0.25 * stage["requests"].bit_length() / most.bit_length()
        axes.axvspan(stage["begin"], stage["end"], color=KIND_COLORS[stage["kind"]], alpha=alpha, linewidth=0)


def _line(axes: Any, windows: Sequence[Figures], name: str, color: str, label: str | None) -> None:
    rows = [row for row in windows if row[name]]
    middles = [(row["begin"] + row["end"]) / 2 for row in rows]
    axes.plot(middles, [row[name] for row in rows], color=color, linewidth=1, label=label)


def _shape_marks(axes: Any, windows: Sequence[Figures]) -> None:
    """A mark for each shape of a window, the larger the more of its steps had it."""
    names = sorted({name for row in windows for name in row["shapes"]}, key=_shape_order)
    marks = [
        ((row["begin"] + row["end"]) / 2, names.index(name), 24 * times / sum(row["shapes"].values()))
        for row in windows
        for name, times in row["shapes"].items()
    ]
    if marks:
        times, rows, sizes = zip(*marks, strict=True)
        axes.scatter(times, rows, s=sizes, marker="s", color="black")
    axes.set_yticks(range(len(names)), names)


def _shape_order(name: str) -> tuple[float, ...]:
    """Plain decoding first, then by branching, levels and nodes."""
    if name == "off":
        return ()
    levels, branching, nodes = map(float, name.split(","))
    return branching, levels, nodes


def main() -> None:
    """A changing load: from 1 to 128 requests and back, in stages of code, dialogue and random text.

        python -m benchmarks.changing_load --model DIR/target --eagle3 DIR/eagle3 [--seconds 2] [--plot PNG]

    DIR is the output of ``python -m benchmarks.cost_faithful``. The scenario runs under plain decoding, the best
    fixed shape (``--fixed``) and the controller, in turns, with the same prompts and seeds. When a request ends the
    next begins. Tokens per second are by the wall clock, prefill included. Code and dialogue are greedy; random
    text is random tokens continued at temperature 2. Of the steps, only windows are kept.
    """
    parser = load_options(main.__doc__)
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
        measured = measure(llm, policies, prompts, args)
    print(*map(line, stage_rows(measured)), sep="\n")
    figures = {"fixed": spelled((steps, topk, tokens)), "policies": measured}
    print(write_results("changing_load", figures, args.output))
    if args.plot:
        plot(figures, args.plot)
        print(args.plot)


Halves = Mapping[str, tuple[Sequence[list[int]], Mapping[str, Any]]]
"""Of each half prompts and sampling."""
UNIFORM: tuple[Speculation, ...] = (
    *((levels, 1, levels + 1) for levels in (1, 2, 3, 4, 5, 8)),
    *((4, 2, 6), (4, 4, 8), (4, 4, 16)),
)
SHARED: tuple[Speculation, ...] = (
    *((4, 1, 2), (8, 1, 2), (5, 1, 3), (8, 1, 3), (6, 1, 4), (8, 1, 4), (8, 1, 5)),
    *((4, 4, 4), (4, 4, 8)),
)
"""Chains of one level more than they have nodes would be uniform."""
QUICK_UNIFORM, QUICK_SHARED = ((3, 1, 4), (4, 2, 4)), ((6, 1, 3), (4, 2, 4))
OUTSIDE = 6.0


def easiest(
    llm: LLM, policy: ShapePolicy, dialogues: Sequence[list[int]], count: int, new_tokens: int
) -> tuple[list[list[int]], list[float]]:
    """The dialogues whose steps give most tokens under a policy, and how many they give."""
    with under(llm, policy):
        outputs = llm.generate(list(dialogues), SamplingParams(temperature=0, max_tokens=new_tokens))
    ranked = sorted(outputs, key=lambda output: -output.speculation.mean_accepted_length)[:count]
    return (
        [output.prompt_token_ids for output in ranked],
        [round(output.speculation.mean_accepted_length, 2) for output in ranked],
    )


def outside_draft(llm: LLM, tokens: int) -> dict[int, float]:
    """A bias to those of the first ``tokens`` ids that cannot be drafted, as many as a request may have."""
    drafter = scheduler_of(llm).runner.context.drafter
    inside = set() if drafter.vocab is None else set(drafter.vocab.ids.tolist())
    outside = [token for token in range(tokens) if token not in inside]
    return dict.fromkeys(outside[: MAX_BIAS - 16], OUTSIDE)


def make_halves(llm: LLM, policy: ShapePolicy, args: argparse.Namespace) -> tuple[Halves, list[float]]:
    """Prompts and sampling of the two halves, and tokens a step of the easy ones under a policy."""
    prompts = prompts_by_kind(args)
    dialogues = prompts["dialogue"][:8] if args.quick else prompts["dialogue"]
    easy, lengths = easiest(llm, policy, dialogues, args.batch // 2, args.new_tokens)
    hopeless = SAMPLING["random"]
    if args.hopeless == "outside":
        bias = outside_draft(llm, used_tokens(args.model))
        hopeless = {"temperature": 1.0, "ignore_eos": True, "logit_bias": bias}
    return {"easy": (easy, SAMPLING["dialogue"]), "hopeless": (prompts["random"], hopeless)}, lengths


def run_mixed(
    llm: LLM, policy: ShapePolicy, halves: Halves, cap: int | None, args: argparse.Namespace
) -> dict[str, float]:
    """Tokens a second, and tokens a step of each half, once the batch is full and its requests out of step."""
    speculation = RequestSpeculation(max_draft_tokens=cap)
    jobs = {
        half: endless(prompts, args.new_tokens, **sampling, speculation=speculation)
        for half, (prompts, sampling) in halves.items()
    }
    wanted = {"easy": args.batch // 2, "hopeless": args.batch - args.batch // 2}
    with ClosedLoop(scheduler_of(llm), policy, jobs) as loop:
        loop.run(wanted, args.settle)
        begin = loop.now()
        loop.run(wanted, args.seconds)
        steps = [step for step in loop.steps if step.at >= begin]
        delivered = [each for each in loop.deliveries if each.at >= begin and each.by_step]
    tokens = {half: [each.tokens for each in delivered if each.kind == half] for half in wanted}
    return {
        "tokens_per_second": sum(map(sum, tokens.values())) / sum(step.seconds for step in steps),
        "ms_per_step": median(step.seconds for step in steps) * 1e3,
        **{half: sum(counts) / max(1, len(counts)) for half, counts in tokens.items()},
        "drafted": sum(step.drafted for step in steps) / sum(step.requests for step in steps),
    }


def mixed_cases(
    uniform: Sequence[Speculation], shared: Sequence[Speculation]
) -> dict[str, tuple[str, int | None]]:
    """By name: which policy, and the most nodes that a request may have."""
    cases: dict[str, tuple[str, int | None]] = {"off": ("off", None)}
    cases |= {f"uniform {spelled(each)}": (spelled(each), each[-1] - 1) for each in uniform}
    cases |= {f"shared {spelled(each)}": (spelled(each), None) for each in shared}
    return cases | {"adaptive": ("adaptive", None)}


def measure_mixed(
    llm: LLM,
    policies: Mapping[str, ShapePolicy],
    cases: Mapping[str, tuple[str, int | None]],
    halves: Halves,
    args: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """Medians over rounds in which every case has its turn."""
    rounds = [
        {name: run_mixed(llm, policies[policy], halves, cap, args) for name, (policy, cap) in cases.items()}
        for _ in range(args.repeats)
    ]
    return {name: medians([each[name] for each in rounds]) for name in cases}


def compare_mixed(cases: Mapping[str, Mapping[str, float]]) -> Figures:
    """The fastest case of either kind, and ratios of tokens a second."""
    rates = {name: row["tokens_per_second"] for name, row in cases.items()}
    best = {
        kind: max((name for name in cases if name.startswith(kind)), key=rates.__getitem__)
        for kind in ("uniform", "shared")
    }
    uniform, shared, ours = rates[best["uniform"]], rates[best["shared"]], rates["adaptive"]
    ratios = {
        "shared_to_uniform": shared / uniform,
        "adaptive_to_uniform": ours / uniform,
        "adaptive_to_shared": ours / shared,
        "adaptive_to_off": ours / rates["off"],
    }
    return {"best": best, "ratios": ratios}


def mixed_batch() -> None:
    """A batch that is half easy and half hopeless to draft for: a shared node budget against equal ones.

        python -m benchmarks.changing_load mixed_batch --model DIR/target --eagle3 DIR/eagle3 [--batch 32]
            [--seconds 3] [--repeats 1]

    DIR is the output of ``python -m benchmarks.cost_faithful``. Easy requests are the greedy held-out dialogues
    with the highest acceptance in a first pass. Hopeless ones are random tokens, biased by ``OUTSIDE`` to continue
    with tokens outside the draft's vocabulary; with ``--hopeless hot``, they run at a high temperature instead,
    where the draft is wrong but often confident. The batch is kept full: when a request ends the next of its half
    begins. *Uniform* shapes give every request the same number of nodes (``speculation.max_draft_tokens``),
    *shared* ones give the same total to the most confident drafts. Tokens per second are the tokens of steps over
    the device time of steps, both without prefill.
    """
    parser = load_options(mixed_batch.__doc__)
    parser.set_defaults(repeats=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--hopeless", choices=("outside", "hot"), default="outside")
    parser.add_argument("--new-tokens", type=int, default=192, help="at most, of a request")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds before each measurement")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    args = parse_load(parser)
    uniform, shared = (QUICK_UNIFORM, QUICK_SHARED) if args.quick else (UNIFORM, SHARED)
    if args.quick:
        args.batch, args.settle, args.seconds, args.new_tokens = 4, 0.3, min(args.seconds, 1.0), 24
    named = mixed_cases(uniform, shared)
    fixed = list(dict.fromkeys([*uniform, *shared]))
    with adaptive_llm(args, args.batch, fixed, smallest=args.batch * 3 // 4) as (llm, policies):
        deepest = spelled(max(uniform, key=lambda each: (each[1] == 1, each[0])))
        halves, lengths = make_halves(llm, policies[deepest], args)
        print(f"easy dialogues give {min(lengths)} to {max(lengths)} tokens a step of {deepest}")
        cases = measure_mixed(llm, policies, named, halves, args)
    figures = {"cases": cases, **compare_mixed(cases), "easy_lengths": lengths}
    show(figures)
    print(write_results("mixed_batch", figures, args.output))


if __name__ == "__main__":
    run_command(main, mixed_batch)
