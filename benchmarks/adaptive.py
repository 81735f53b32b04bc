"""The controller against fixed shapes and against drafts that are never right; the tuner against exhaustive search."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import yaml

import specserve.process.assemble
from benchmarks.closed_loop import ClosedLoop, Step, endless
from benchmarks.common import load_options, load_prompts, make_prompts, parse_load
from benchmarks.results import options, run_command, write_results
from specserve import LLM, SamplingParams
from specserve.config.paths import BUNDLED_DRAFTS, BUNDLED_MODEL
from specserve.config.speculation import SHAPE
from specserve.engine.shapes import ShapePlan, ShapePolicy, Speculation, StaticShapes, step_shape
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
    assert llm.engine is not None
    runner = llm.engine.runner
    assert isinstance(runner, MeteredRunner)
    first = turn * (load.batch + load.requests)
    jobs = {"": endless(load.prompts, load.new_tokens, first, temperature=load.temperature, ignore_eos=True)}
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


def measure_policies(
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


def policy_line(batch: int, found: Mapping[str, dict[str, Any]], names: Sequence[str]) -> str:
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


def policy_header(policies: Sequence[str]) -> str:
    columns = f" {'/best':>6} {'/off':>6} {'stepping':>8} {'/off':>8}"
    return f"{'batch':>5} " + " ".join(f"{name:>9}" for name in policies) + columns


def main() -> None:
    """The controller against every fixed shape and plain decoding, in tokens per second by batch size.

        python -m benchmarks.adaptive --model DIR/target --eagle3 DIR/eagle3 [--batches 1 2 4 8] [--repeats 2]

    DIR is the output of ``python -m benchmarks.cost_faithful``; ``--eagle3 DIR/eagle3_useless`` is a draft that is
    never right. One engine runs all policies in turns, so that a machine that slows down affects all alike. Fixed
    shapes are forced upon its scheduler; the controller keeps what it learned from one batch size to the next, as
    in a server. All requests are greedy; in 16 bits near-ties make some texts diverge. Each turn continues in the
    prompts where the last one ended. A fixed shape that is far behind the best in the first turn, marked ``-``,
    gets no other. Batches are kept full: when a request ends the next begins, with its prompt in the prefix cache.
    Tokens per second are by the wall clock; they include the time to start a request, but not its first token. The
    last two columns are by the device time of steps, which is what the controller can influence. Answers have half
    to all of ``--new-tokens``.
    """
    parser = load_options(main.__doc__)
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
        print(policy_header(names))
        for size in sizes:
            load = Load.of(args, prompts, size)
            # It may learn what a server that runs has learned.
            run_load(llm, policies["adaptive"], load, args.repeats)
            found = measure_policies(llm, policies, load, args.repeats)
            rows.append({"batch": size, "policies": found})
            print(policy_line(size, found, names), flush=True)
            written = write_results("adaptive", rows, args.output)  # each time: a run may be cut short
            policies = {name: policies[name] for name in still_worth(policies, found)}
    print(written)


def add_requests(parser: argparse.ArgumentParser) -> None:
    text = "of each turn, at least; twice the batch if that is more"
    parser.add_argument("--requests", type=int, default=12, help=text)


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
    given: dict[str, Any] = {"speculative_draft_model_path": None if make is None else str(make(folder))}
    prompts = make_prompts(args, 16)
    with adaptive_llm(args, 1, fixed=(), speculative_algorithm=method, **given) as (llm, policies):
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
    time.perf_counter = time.process_time  # type: ignore[assignment]
    fixed: dict[str, Any] = {"prompts": "heldout", "prompt_tokens": 64, "new_tokens": 200, "requests": 3}
    args = argparse.Namespace(
        model=str(BUNDLED_MODEL), eagle3=None, dtype="auto", repeats=chosen.repeats, **fixed
    )
    for method in chosen.methods:
        with tempfile.TemporaryDirectory() as folder:
            measure(method, args, Path(folder))


WORKLOADS = {"code": "prompt", "dialogue": "messages"}
"""By the field that their prompts have."""
GRID = {"steps": (1, 3, 5, 7), "topk": (1, 4, 8), "draft_tokens": (8, 16, 32)}
GOAL = 0.98
Picked = tuple[int, ...] | None


def tune(given: Sequence[str], directory: Path, name: str) -> tuple[list[dict[str, Any]], Picked, float]:
    """What it measured at each batch size, its pick for all of them, and seconds from the command to its end."""
    found, output = directory / f"{name}.json", directory / f"{name}.yaml"
    begin = time.perf_counter()
    command = [sys.executable, "-m", "specserve.tune", *given, "--output", str(output), "--json", str(found)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    settings = yaml.safe_load(output.read_text())
    picked = tuple(settings[key] for key in SHAPE) if SHAPE[0] in settings else None
    return json.loads(found.read_text())["batches"], picked, time.perf_counter() - begin


def ratios_by_shape(batch: dict[str, Any]) -> dict[Picked, float]:
    """Time plain decoding, by shape."""
    return {shape_of(row["shape"]): row["ratio_to_plain"] for row in batch["shapes"]}


def shape_of(found: Sequence[int] | None) -> Picked:
    return None if found is None else tuple(found)


def compare(
    given: Sequence[str], minutes: float, exhaustive_minutes: float, directory: Path
) -> dict[str, Any]:
    """One workload: picks, best shapes, and what share of these the picks reach."""
    tuned, overall, seconds = tune([*given, "--minutes", str(minutes)], directory, "tuned")
    thorough = [*given, "--minutes", str(exhaustive_minutes), "--exhaustive"]
    all_, best_overall, _ = tune(thorough, directory, "exhaustive")
    rows, shares = [], []
    for ours, theirs in zip(tuned, all_, strict=True):
        ratios, pick = ratios_by_shape(theirs), shape_of(ours["best"])
        best = max(ratios, key=lambda shape: ratios[shape])
        shares.append(ratios[overall] / ratios[best_overall])
        rows.append(
            {
                "batch": ours["batch"],
                "pick": pick,
                "best": best,
                "share": ratios[pick] / ratios[best],
                "ratios": {
                    "off" if shape is None else ",".join(map(str, shape)): r for shape, r in ratios.items()
                },
            }
        )
    share = exp(sum(map(log, shares)) / len(shares))
    return {"seconds": seconds, "pick": overall, "best": best_overall, "share": share, "batches": rows}


def tuner_lines(name: str, found: dict[str, Any]) -> list[str]:
    rows = [("all", found), *((f"batch {row['batch']}", row) for row in found["batches"])]
    return [f"{name}, tuner's whole command {found['seconds']:.0f} s"] + [
        f"  {what:10} pick {row['pick']!s:12} best {row['best']!s:12} share {row['share']:.3f}, goal {GOAL}"
        for what, row in rows
    ]


def tuner() -> None:
    """The tuner against exhaustive search, on code and on dialogues: how close its pick comes to the best shape.

        python -m benchmarks.adaptive tuner --model DIR/target --eagle3 DIR/eagle3 [--minutes 2]
            [--exhaustive-minutes 6] [--batches 1 16] [--workloads code]

    Both run as separate commands, one after the other, over the same shapes. A pick is judged by the exhaustive
    search's measurement of it: its tokens per second relative to plain decoding in the same lap, against the best
    of all shapes.
    """
    parser = options(tuner.__doc__)
    parser.add_argument("--model", default=str(BUNDLED_MODEL))
    parser.add_argument("--eagle3", default=str(BUNDLED_DRAFTS["EAGLE3"]))
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--exhaustive-minutes", type=float, help="not set: as --minutes")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    for name, values in GRID.items():
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="+", type=int, default=list(values))
    args = parser.parse_args()
    figures = {}
    for name in args.workloads:
        field = WORKLOADS[name]
        with tempfile.TemporaryDirectory() as place:
            prompts = Path(place) / "prompts.jsonl"
            prompts.write_text("".join(json.dumps(row) + "\n" for row in load_prompts() if field in row))
            given = ["--model-path", args.model, "--speculative-algorithm", "EAGLE3"]
            given += ["--speculative-draft-model-path", args.eagle3, "--prompts", str(prompts)]
            given += ["--max-running-requests", str(max(args.batches))]
            for option, values in {
                "batch_sizes": args.batches,
                **{name: getattr(args, name) for name in GRID},
            }.items():
                given += [f"--{option.replace('_', '-')}", *map(str, values)]
            figures[name] = compare(given, args.minutes, args.exhaustive_minutes or args.minutes, Path(place))
        print("\n".join(tuner_lines(name, figures[name])), flush=True)
        written = write_results("tuner", figures, args.output)
    print(written)


if __name__ == "__main__":
    run_command(main, never_right, tuner)
