"""The controller under loads that are not uniform: changing, long and mixed."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import specserve.models.read_config
from benchmarks.adaptive import (
    Load,
    adaptive_llm,
    add_requests,
    cache_prompts,
    measure_policies,
    policy_header,
    policy_line,
    run_load,
    spelled,
    under,
)
from benchmarks.closed_loop import NONE, ClosedLoop, Delivery, Jobs, Step, endless, forced_levels
from benchmarks.common import (
    load_options,
    load_prompts,
    make_prompts,
    parse_load,
    random_prompts,
    used_tokens,
)
from benchmarks.plots import plot_changing_load
from benchmarks.results import run_command, write_results
from specserve import LLM, SamplingParams
from specserve.core import MAX_BIAS
from specserve.core import Speculation as RequestSpeculation
from specserve.engine.shapes import ShapePolicy, Speculation
from specserve.frontend.tokenizer import Tokenizer
from specserve.models.config import ModelConfig

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
        found = measure(llm, policies, prompts, args)
    for line in stage_lines(found):
        print(line, flush=True)
    figures = {"fixed": spelled((steps, topk, tokens)), "policies": found}
    print(write_results("changing_load", figures, args.output))
    if args.plot:
        plot_changing_load(figures, args.plot)
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
GOAL = 1.12
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
    assert llm.engine is not None
    drafter = llm.engine.runner.context.drafter
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
    assert llm.engine is not None
    speculation = RequestSpeculation(max_draft_tokens=cap)
    jobs = {
        half: endless(prompts, args.new_tokens, **sampling, speculation=speculation)
        for half, (prompts, sampling) in halves.items()
    }
    wanted = {"easy": args.batch // 2, "hopeless": args.batch - args.batch // 2}
    with ClosedLoop(llm.engine, policy, jobs) as loop:
        loop.run(wanted, args.settle)
        begin = loop.now()
        loop.run(wanted, args.seconds)
        steps = [step for step in loop.steps if step.at >= begin]
        given = [each for each in loop.deliveries if each.at >= begin and each.by_step]
    tokens = {half: [each.tokens for each in given if each.kind == half] for half in wanted}
    return {
        "tokens_per_second": sum(map(sum, tokens.values())) / sum(step.seconds for step in steps),
        "ms_per_step": median(step.seconds for step in steps) * 1e3,
        **{half: sum(found) / max(1, len(found)) for half, found in tokens.items()},
        "drafted": sum(step.drafted for step in steps) / sum(step.requests for step in steps),
    }


def mixed_cases(
    uniform: Sequence[Speculation], shared: Sequence[Speculation]
) -> dict[str, tuple[str, int | None]]:
    """By name: which policy, and the most nodes that a request may have."""
    found: dict[str, tuple[str, int | None]] = {"off": ("off", None)}
    found |= {f"uniform {spelled(each)}": (spelled(each), each[-1] - 1) for each in uniform}
    found |= {f"shared {spelled(each)}": (spelled(each), None) for each in shared}
    return found | {"adaptive": ("adaptive", None)}


def mixed_batch_measure(
    llm: LLM,
    policies: Mapping[str, ShapePolicy],
    named: Mapping[str, tuple[str, int | None]],
    halves: Halves,
    args: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """Medians over rounds in which every case has its turn."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in named}
    for _ in range(args.repeats):
        for name, (policy, cap) in named.items():
            rows[name].append(run_mixed(llm, policies[policy], halves, cap, args))
    return {
        name: {key: median(row[key] for row in found) for key in found[0]} for name, found in rows.items()
    }


def best(found: Mapping[str, Mapping[str, float]], kind: str) -> str:
    """The fastest of those whose names begin so."""
    return max((name for name in found if name.startswith(kind)), key=lambda n: found[n]["tokens_per_second"])


def report_mixed(found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Print all rows and return what they come to."""
    print(f"{'':16} {'tok/s':>8} {'ms/step':>8} {'easy':>6} {'hopeless':>8} {'drafted':>7}")
    for name, row in found.items():
        print(
            f"{name:16} {row['tokens_per_second']:8.0f} {row['ms_per_step']:8.2f} {row['easy']:6.2f} "
            f"{row['hopeless']:8.2f} {row['drafted']:7.2f}"
        )
    names = {"uniform": best(found, "uniform"), "shared": best(found, "shared")}
    rates = {name: row["tokens_per_second"] for name, row in found.items()}
    uniform, shared, ours = rates[names["uniform"]], rates[names["shared"]], rates["adaptive"]
    ratios = {
        "shared_to_uniform": shared / uniform,
        "adaptive_to_uniform": ours / uniform,
        "adaptive_to_shared": ours / shared,
        "adaptive_to_off": ours / rates["off"],
    }
    print(f"best: {names['uniform']}, {names['shared']}; shared / uniform wanted {GOAL}")
    print(", ".join(f"{name.replace('_to_', ' / ')} {value:.3f}" for name, value in ratios.items()))
    return {"best": names, "ratios": ratios}


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
        rows = mixed_batch_measure(llm, policies, named, halves, args)
    summary = report_mixed(rows)
    print(write_results("mixed_batch", {"cases": rows, **summary, "easy_lengths": lengths}, args.output))


BATCHES = (64,)
SHAPES: tuple[Speculation, ...] = ((1, 1, 2), (2, 1, 3), (3, 1, 4), (5, 1, 6), (4, 4, 8))
ACCEPTANCE = {"natural": NONE, "three": 2}
"""Draft levels that are accepted by force."""
LONG_CONTEXT_GOAL = 1.5  # times plain decoding, where steps give three tokens


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
    args: argparse.Namespace, sizes: list[int], shapes: Sequence[Speculation]
) -> list[dict[str, Any]]:
    """All batches with both kinds of acceptance, each printed as it comes."""
    if args.prompts == "random":
        prompts = random_prompts(used_tokens(args.model), max(sizes), args.prompt_tokens)
    else:
        prompts = make_prompts(args, max(sizes))
    rows = []
    with (
        longer_contexts(args.prompt_tokens + args.new_tokens),
        forced_levels() as force,
        adaptive_llm(args, max(sizes), shapes, min(sizes), kv_cache_dtype=args.kv_cache_dtype) as (
            llm,
            policies,
        ),
    ):
        cache_prompts(llm, policies["off"], prompts)
        print(f"{'':8}" + policy_header(list(policies)))
        for size in sizes:
            for name, levels in ACCEPTANCE.items():
                force(levels)
                load = Load.of(args, prompts, size)
                run_load(llm, policies["adaptive"], load)
                found = measure_policies(llm, policies, load, args.repeats)
                rows.append({"batch": size, "acceptance": name, "policies": found})
                print(f"{name:8}" + policy_line(size, found, list(policies)), flush=True)
                print(f"{'':13}" + "".join(f" {row['accepted_length']:9.2f}" for row in found.values()))
    return rows


def ratio_to_off(row: dict[str, Any], name: str) -> float:
    """Tokens a second against those of plain decoding."""
    policies = row["policies"]
    found: float = policies[name]["tokens_per_second"] / policies["off"]["tokens_per_second"]
    return found


def long_context() -> None:
    """Long contexts: 64 requests of 8,192 random tokens each, by shape and under the controller.

        python -m benchmarks.changing_load long_context --model DIR/target --eagle3 DIR/eagle3 [--batches 16 64]
            [--requests 12] [--shapes 3,1,4] [--kv-cache-dtype fp8_e4m3]

    DIR is the output of ``python -m benchmarks.cost_faithful``. Reading the caches takes most of a step, and its
    cost does not depend on how many tokens a step gives. Everything is measured twice: with the pair's own
    acceptance on such contexts, and with three tokens per step (two levels accepted by force, and the bonus token;
    fewer if a shape has one level or a limit is near). Contexts are prefilled once and stay in the prefix cache;
    batches are kept full, as in ``benchmarks.adaptive``.
    """
    parser = load_options(long_context.__doc__)
    parser.set_defaults(prompts="random", prompt_tokens=8192, repeats=1)
    parser.add_argument("--new-tokens", type=int, default=128)
    add_requests(parser)
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--shapes", nargs="*", choices=list(map(spelled, SHAPES)), help="not set: all")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto")
    args = parse_load(parser)
    shapes: Sequence[Speculation] = [
        each for each in SHAPES if args.shapes is None or spelled(each) in args.shapes
    ]
    if args.quick:
        args.batches, args.requests, args.new_tokens, shapes = [2], 4, 10, SHAPES[1:3]
    sizes = [size for size in args.batches if size <= args.max_batch]
    rows = run_long(args, sizes, shapes)
    for row in rows:
        if row["acceptance"] == "three":
            print(
                f"batch {row['batch']}: adaptive / off {ratio_to_off(row, 'adaptive'):.2f}, wanted {LONG_CONTEXT_GOAL}"
            )
    print(write_results("long_context", rows, args.output))


if __name__ == "__main__":
    run_command(main, mixed_batch, long_context)
