"""A batch that is half easy and half hopeless to draft for: a shared node budget against equal ones.

    python -m benchmarks.mixed_batch --model DIR/target --eagle3 DIR/eagle3 [--batch 32] [--seconds 3] [--repeats 1]

DIR is the output of ``python -m benchmarks.cost_faithful``. Easy requests are the greedy held-out dialogues with the
highest acceptance in a first pass. Hopeless ones are random tokens, biased by ``OUTSIDE`` to continue with tokens
outside the draft's vocabulary; with ``--hopeless hot``, they run at a high temperature instead, where the draft is
wrong but often confident. The batch is kept full: when a request ends the next of its half begins. *Uniform* shapes
give every request the same number of nodes (``speculation.max_draft_tokens``), *shared* ones give the same total to the
most confident drafts. Tokens per second are the tokens of steps over the device time of steps, both without prefill.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.adaptive import adaptive_llm, spelled, under
from benchmarks.changing_load import SAMPLING, prompts_by_kind
from benchmarks.closed_loop import ClosedLoop, endless
from benchmarks.common import load_options, parse_load, used_tokens, write_results
from specserve import LLM, SamplingParams
from specserve.core import MAX_BIAS
from specserve.core import Speculation as RequestSpeculation
from specserve.engine.shapes import ShapePolicy, Speculation

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


def run_load(
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


def cases(uniform: Sequence[Speculation], shared: Sequence[Speculation]) -> dict[str, tuple[str, int | None]]:
    """By name: which policy, and the most nodes that a request may have."""
    found: dict[str, tuple[str, int | None]] = {"off": ("off", None)}
    found |= {f"uniform {spelled(each)}": (spelled(each), each[-1] - 1) for each in uniform}
    found |= {f"shared {spelled(each)}": (spelled(each), None) for each in shared}
    return found | {"adaptive": ("adaptive", None)}


def measure(
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
            rows[name].append(run_load(llm, policies[policy], halves, cap, args))
    return {
        name: {key: median(row[key] for row in found) for key in found[0]} for name, found in rows.items()
    }


def best(found: Mapping[str, Mapping[str, float]], kind: str) -> str:
    """The fastest of those whose names begin so."""
    return max((name for name in found if name.startswith(kind)), key=lambda n: found[n]["tokens_per_second"])


def report(found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
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


def main() -> None:
    parser = load_options(__doc__)
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
    named = cases(uniform, shared)
    fixed = list(dict.fromkeys([*uniform, *shared]))
    with adaptive_llm(args, args.batch, fixed, smallest=args.batch * 3 // 4) as (llm, policies):
        deepest = spelled(max(uniform, key=lambda each: (each[1] == 1, each[0])))
        halves, lengths = make_halves(llm, policies[deepest], args)
        print(f"easy dialogues give {min(lengths)} to {max(lengths)} tokens a step of {deepest}")
        rows = measure(llm, policies, named, halves, args)
    summary = report(rows)
    print(write_results("mixed_batch", {"cases": rows, **summary, "easy_lengths": lengths}, args.output))


if __name__ == "__main__":
    main()
