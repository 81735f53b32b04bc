"""Break down a step's time: its kernels by kind, and the device's idle time between steps.

    python -m benchmarks.step_trace --model DIR/target --eagle3 DIR/eagle3 --shape 3,1,4 --batch 1 [--picture P.png]

The profiler's device side traces the steps of a running ``LLM.generate``. A graph's kernels share one launch, which
tells the steps apart. ``idle`` is the time between the end of one step's last kernel and the start of the next step's
first in which nothing else ran. A kernel may begin while the previous one ends, and wait: its time is that by which it
ends after all earlier ones, without a gap before it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import generate_timed, load_options, make_prompts, open_llm, parse_load, write_results
from benchmarks.floors import Shape, applies, step_ms

KINDS = (
    ("gemm", ("gemm", "nvjet", "cutlass", "splitK", "xmma", "cublas", "_linear")),
    ("attention", ("_paged", "_attend", "attention", "_combine", "_split", "verify", "decode")),
    ("norm", ("norm",)),
    ("rotary + KV store", ("rotary", "_rope", "_store")),
    ("activation", ("silu", "activation")),
    ("sampling", ("_scan", "_finish")),
    (
        "tree",
        (
            "grow",
            "_root",
            "_pack",
            "select",
            "accept",
            "advance",
            "follow",
            "move",
            "single",
            "_cap",
            "_emit",
        ),
    ),
    ("pairs", ("pair",)),
)


@dataclass(frozen=True, slots=True)
class Event:
    """A device event: microseconds, and the launch it belongs to."""

    name: str
    start: float
    duration: float
    launch: int

    @property
    def end(self) -> float:
        return self.start + self.duration


def traced(run: Any) -> tuple[list[Event], list[Event]]:
    """Kernels and copies of what ``run`` did, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        rows = json.loads(path.read_text())["traceEvents"]
    return _events(rows, ("kernel",)), _events(rows, ("gpu_memcpy", "gpu_memset"))


def _events(rows: Sequence[dict[str, Any]], kinds: Sequence[str]) -> list[Event]:
    found = [
        Event(row["name"], row["ts"], row["dur"], row["args"].get("correlation", -1))
        for row in rows
        if row.get("cat") in kinds
    ]
    return sorted(found, key=lambda event: event.start)


def steps_of(kernels: Sequence[Event]) -> list[list[Event]]:
    """The kernels of each graph launch: those launches that hold many."""
    by_launch: dict[int, list[Event]] = defaultdict(list)
    for event in kernels:
        by_launch[event.launch].append(event)
    return sorted(
        (group for group in by_launch.values() if len(group) > 30), key=lambda group: group[0].start
    )


def idle_share(steps: Sequence[Sequence[Event]], others: Sequence[Event]) -> float:
    """Part of the time from the first step's start to the last one's end in which nothing ran between steps."""
    idle = 0.0
    for before, after in itertools.pairwise(steps):
        start, end = max(e.end for e in before), after[0].start
        busy = sum(max(0.0, min(e.end, end) - max(e.start, start)) for e in others)
        idle += max(0.0, end - start - busy)
    return idle / (max(e.end for e in steps[-1]) - steps[0][0].start)


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS if any(word in name for word in words)), "other")


def own_times(step: Sequence[Event]) -> list[float]:
    """Microseconds of each kernel of a step; with the gaps between them they are the step's."""
    until, found = 0.0, []
    for event in step:
        found.append(max(0.0, event.end - max(until, event.start)))
        until = max(until, event.end)
    return found


def breakdown(steps: Sequence[Sequence[Event]]) -> dict[str, dict[str, float]]:
    """Medians over steps, by kind of kernel: microseconds and launches of a step."""
    each: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for step in steps:
        sums: dict[str, list[float]] = defaultdict(list)
        for event, us in zip(step, own_times(step), strict=True):
            sums[kind_of(event.name)].append(us)
        for kind in {*sums, *each}:
            each[kind].append((sum(sums[kind]), len(sums[kind])))
    return {
        kind: {"us": median(us for us, _ in rows), "launches": median(n for _, n in rows)}
        for kind, rows in sorted(each.items(), key=lambda item: -median(us for us, _ in item[1]))
    }


def by_name(steps: Sequence[Sequence[Event]]) -> list[tuple[str, float, float]]:
    """Kernel name, microseconds and launches a step, most time first."""
    sums: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for event, us in zip(step, own_times(step), strict=True):
            sums[event.name].append(us)
    rows = [(name, sum(all_) / len(steps), len(all_) / len(steps)) for name, all_ in sums.items()]
    return sorted(rows, key=lambda row: -row[1])


def picture(steps: Sequence[Sequence[Event]], others: Sequence[Event], title: str, path: Path) -> None:
    """Two steps and the seam between them, coloured by kind; below, the seam alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [kind for kind, _ in KINDS] + ["other", "copy"]
    colours = dict(zip(kinds, pyplot.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
    middle = len(steps) // 2
    shown = [e for step in steps[middle : middle + 2] for e in step]
    zero, seam = shown[0].start, steps[middle + 1][0].start
    copies = [e for e in others if zero <= e.start <= shown[-1].end]
    figure, axes = pyplot.subplots(2, 1, figsize=(11, 4.2))
    for axis in axes:
        for kind in kinds:
            events = copies if kind == "copy" else [e for e in shown if kind_of(e.name) == kind]
            bars = [((e.start - zero) / 1e3, e.duration / 1e3) for e in events]
            axis.broken_barh(bars, (0, 1), color=colours[kind], label=kind if events else None)
        axis.set_yticks([])
        axis.set_xlabel("ms")
    axes[0].set_title(title)
    axes[0].legend(ncols=5, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    axes[1].set_xlim((seam - zero) / 1e3 - 0.1, (seam - zero) / 1e3 + 0.1)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def trace_steps(llm: Any, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[Event]], list[Event]]:
    """The steps of one call and what else the device did."""
    generate_timed(llm, prompts, new_tokens)
    kernels, copies = traced(lambda: generate_timed(llm, prompts, new_tokens))
    steps = steps_of(kernels)
    launches = {step[0].launch for step in steps}
    steps = steps[2:-2]  # the first share the device with prefill, the last run ahead of the end
    inside = [e for e in kernels if e.launch not in launches]
    return steps, sorted([*copies, *inside], key=lambda e: e.start)


def report(args: argparse.Namespace, shape: Shape | None, batch: int, llm: Any) -> dict[str, Any]:
    """Print and return one case."""
    steps, others = trace_steps(llm, make_prompts(args, batch), args.new_tokens)
    starts = [step[0].start for step in steps]
    period = median(b - a for a, b in itertools.pairwise(starts))
    busy = median(sum(own_times(step)) for step in steps)
    context = args.prompt_tokens + args.new_tokens // 2
    floor = step_ms(shape, batch, context, args.quantization) if applies(args.model) else None
    found = {
        "shape": shape,
        "batch": batch,
        "steps": len(steps),
        "step_us": period,
        "kernels_us": busy,
        "kernels": median(len(step) for step in steps),
        "idle_between_steps": idle_share(steps, others),
        "floor_us": None if floor is None else floor * 1e3,
        "by_kind": breakdown(steps),
        "by_name": by_name(steps)[:25],
    }
    print(
        f"{shape or 'off'} batch {batch}: step {period:.0f} us, kernels {busy:.0f} us in {found['kernels']:.0f} "
        f"launches, idle between steps {found['idle_between_steps']:.2%}, floor {(floor or 0) * 1e3:.0f} us"
    )
    for kind, row in found["by_kind"].items():
        print(f"  {kind:18} {row['us']:8.1f} us {row['launches']:5.0f} launches")
    if args.picture is not None:
        picture(steps, others, f"{shape or 'off'} (steps, topk, tokens), batch {batch}", args.picture)
    return found


def main() -> None:
    parser = load_options(__doc__, quantization=True)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--shape", default="off", help="off, or steps,topk,tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    args = parse_load(parser)
    parts = [] if args.shape == "off" else [int(part) for part in args.shape.split(",")]
    shape: Shape | None = (parts[0], parts[1], parts[2]) if parts else None
    with open_llm(args, shape, args.batch) as llm:
        found = report(args, shape, args.batch, llm)
    print(write_results(f"step_trace_{args.shape.replace(',', '_')}_b{args.batch}", found, args.output))


if __name__ == "__main__":
    main()
