"""What the device does in a step: kernels by kind, idle time between steps, each kernel against its floor."""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import (
    Shape,
    drawn,
    generate_timed,
    load_options,
    make_prompts,
    open_llm,
    parse_load,
    parse_shape,
)
from benchmarks.results import Figures, line, run_command, show, write_results
from benchmarks.steps import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, READ_BYTES_PER_S, applies, step_ms

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
            *("grow", "_root", "_pack", "select", "accept", "advance"),
            *("follow", "move", "single", "_cap", "_emit"),
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
    events = [
        Event(row["name"], row["ts"], row["dur"], row["args"].get("correlation", -1))
        for row in rows
        if row.get("cat") in kinds
    ]
    return sorted(events, key=lambda event: event.start)


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
    until, times = 0.0, []
    for event in step:
        times.append(max(0.0, event.end - max(until, event.start)))
        until = max(until, event.end)
    return times


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
    kinds = [kind for kind, _ in KINDS] + ["other", "copy"]
    middle = len(steps) // 2
    shown = [e for step in steps[middle : middle + 2] for e in step]
    zero, seam = shown[0].start, steps[middle + 1][0].start
    copies = [e for e in others if zero <= e.start <= shown[-1].end]
    with drawn(path, 2, figsize=(11, 4.2)) as (figure, axes):
        for axis in axes:
            for index, kind in enumerate(kinds):
                events = copies if kind == "copy" else [e for e in shown if kind_of(e.name) == kind]
                bars = [((e.start - zero) / 1e3, e.duration / 1e3) for e in events]
                axis.broken_barh(bars, (0, 1), color=f"C{index}", label=kind if events else None)
            axis.set_yticks([])
            axis.set_xlabel("ms")
        axes[0].set_title(title)
        axes[0].legend(ncols=5, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.25))
        axes[1].set_xlim((seam - zero) / 1e3 - 0.1, (seam - zero) / 1e3 + 0.1)
        figure.tight_layout()


def trace_steps(llm: Any, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[Event]], list[Event]]:
    """The steps of one call and what else the device did."""
    generate_timed(llm, prompts, new_tokens)
    kernels, copies = traced(lambda: generate_timed(llm, prompts, new_tokens))
    steps = steps_of(kernels)
    launches = {step[0].launch for step in steps}
    steps = steps[2:-2]  # the first share the device with prefill, the last run ahead of the end
    inside = [e for e in kernels if e.launch not in launches]
    return steps, sorted([*copies, *inside], key=lambda e: e.start)


def report(args: argparse.Namespace, shape: Shape | None, batch: int, llm: Any) -> Figures:
    """One case."""
    steps, others = trace_steps(llm, make_prompts(args, batch), args.new_tokens)
    starts = [step[0].start for step in steps]
    context = args.prompt_tokens + args.new_tokens // 2
    floor = step_ms(shape, batch, context, args.quantization) if applies(args) else None
    if args.picture is not None:
        picture(steps, others, f"{shape or 'off'} (steps, topk, tokens), batch {batch}", args.picture)
    return {
        "shape": shape,
        "batch": batch,
        "steps": len(steps),
        "step_us": median(b - a for a, b in itertools.pairwise(starts)),
        "kernels_us": median(sum(own_times(step)) for step in steps),
        "kernels": median(len(step) for step in steps),
        "idle_between_steps": idle_share(steps, others),
        "floor_us": None if floor is None else floor * 1e3,
        "by_kind": breakdown(steps),
        "by_name": by_name(steps)[:25],
    }


def main() -> None:
    """Break down a step's time: its kernels by kind, and the device's idle time between steps.

        python -m benchmarks.trace --model DIR/target --eagle3 DIR/eagle3 --shape 3,1,4 --batch 1 [--picture P.png]

    The profiler's device side traces the steps of a running ``LLM.generate``. A graph's kernels share one launch,
    which tells the steps apart. ``idle`` is the time between the end of one step's last kernel and the start of the
    next step's first in which nothing else ran. A kernel may begin while the previous one ends, and wait: its time
    is that by which it ends after all earlier ones, without a gap before it.
    """
    parser = load_options(main.__doc__, quantization=True)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--shape", default="off", help="off, or steps,topk,tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="ranks; rank 0's device is traced"
    )
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--picture", type=Path)
    args = parse_load(parser)
    shape = parse_shape(args.shape)
    with open_llm(args, shape, args.batch) as llm:
        figures = report(args, shape, args.batch, llm)
    print(line(figures))
    show(figures["by_kind"], "  ")
    print(write_results(f"step_trace_{args.shape.replace(',', '_')}_b{args.batch}", figures, args.output))


INNER, VOCAB, DRAFT_VOCAB, QKV = 14336, 128256, 32000, 6144
WEIGHTS = {
    "qkv": HIDDEN * QKV,
    "o": HIDDEN * HIDDEN,
    "gate, up": 2 * HIDDEN * INNER,
    "down": HIDDEN * INNER,
    "head": HIDDEN * VOCAB,
    "draft qkv": 2 * HIDDEN * QKV,
    "draft head": HIDDEN * DRAFT_VOCAB,
    "store qkv": 2 * HIDDEN * 2 * KV_HEADS * HEAD_DIM,
    "fc": 3 * HIDDEN * HIDDEN,
}
"""Numbers read once a launch, by part; a draft's other layers are as the target's."""
NEXT = {"rotary + KV store": "qkv", "activation": "gate, up", "sampling": "head"}
"""What a projection is by the kernel after it."""
Bars = Sequence[Mapping[str, Any]]


def parts(step: Sequence[Event]) -> list[str]:
    """What each kernel of a step is for: a projection by its neighbours, others by their kind. A draft level goes from
    its pairs to its candidates; pairs without candidates begin what fills the draft's cache."""
    kinds = ["sum" if "splitKreduce" in event.name else kind_of(event.name) for event in step]
    names, place = [], ""
    for index, kind in enumerate(kinds):
        if kind == "pairs":
            drafts = next((k for k in kinds[index:] if k in ("sampling", "tree")), "") == "sampling"
            place = "draft " if drafts else "store "
        elif kind == "tree":
            place = ""
        names.append(place + _part(kinds, index))
    return names


def _part(kinds: Sequence[str], index: int) -> str:
    if kinds[index] != "gemm":
        return kinds[index]
    before = next((k for k in reversed(kinds[:index]) if k not in ("other", "sum")), "")
    behind = [k for k in kinds[index + 1 :] if k not in ("other", "sum")]
    if before in ("attention", "activation"):
        return "o" if before == "attention" else "down"
    if behind[:2] == ["gemm", "norm"]:  # the activation is inside
        return "gate, up"
    if before == "gemm" and behind[:1] == ["norm"]:
        return "down"
    return NEXT.get(behind[0] if behind else "", "fc")


def floor_bytes(part: str, context: int) -> float:
    """That one launch must read, in bfloat16."""
    if part.endswith("attention"):
        return 2.0 * 2 * KV_HEADS * HEAD_DIM * context
    name = part if part in WEIGHTS else part.removeprefix("draft ")
    return 2.0 * WEIGHTS.get(name, 0)


def bars(steps: Sequence[Sequence[Event]], context: int) -> list[dict[str, Any]]:
    """Medians over steps that have as many kernels as most, parts in the order of their first kernel; gaps last."""
    size = median(len(step) for step in steps)
    equal = [step for step in steps if len(step) == size]
    names = parts(equal[0])
    times = [own_times(step) for step in equal]
    rows: list[Figures] = []
    for part in dict.fromkeys(names):
        at = [index for index, name in enumerate(names) if name == part]
        us = median(sum(time[index] for index in at) for time in times)
        floor = len(at) * floor_bytes(part, context)
        rows.append({"part": part, "launches": len(at), "us": us, "bytes": floor})
    whole = median(max(e.end for e in step) - step[0].start for step in equal)
    rows.append({"part": "gaps", "launches": 0, "us": whole - sum(row["us"] for row in rows), "bytes": 0})
    return [row | {"floor_us": row["bytes"] / READ_BYTES_PER_S * 1e6} for row in rows]


def lines(rows: Bars) -> list[str]:
    table = [f"{'part':24} {'launches':>8} {'us':>8} {'MB':>8} {'floor us':>8} {'ratio':>6}"]
    for row in (*rows, _sum(rows)):
        ratio = f"{row['us'] / row['floor_us']:6.2f}" if row["floor_us"] else ""
        counts = f"{row['launches']:8} {row['us']:8.1f} {row['bytes'] / 1e6:8.1f}"
        table.append(f"{row['part']:24} {counts} {row['floor_us']:8.1f} {ratio}")
    return table


def _sum(rows: Bars) -> dict[str, Any]:
    return {"part": "all"} | {
        name: sum(row[name] for row in rows) for name in ("launches", "us", "bytes", "floor_us")
    }


def waterfall_picture(panels: Sequence[tuple[str, Bars]], path: Path) -> None:
    """A panel a result: bars begin where the one above ends, dark up to the floor."""
    height = (0.6 + 0.22 * max(len(rows) for _, rows in panels)) * len(panels)
    with drawn(path, len(panels), figsize=(9, height), sharex=True, squeeze=False) as (figure, axes):
        for axis, (title, rows) in zip(axes[:, 0], panels, strict=True):
            at = 0.0
            for index, row in enumerate(rows):
                axis.barh(index, row["us"], left=at, color="tab:orange")
                axis.barh(index, min(row["floor_us"], row["us"]), left=at, color="tab:blue")
                ratio = f", {row['us'] / row['floor_us']:.2f} x its floor" if row["floor_us"] else ""
                text = f" {row['us']:.0f} µs" + (f", {row['bytes'] / 1e6:.0f} MB" if row["bytes"] else "")
                axis.text(at + row["us"], index, text + ratio, va="center", fontsize=7)
                at += row["us"]
            axis.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=7)
            axis.invert_yaxis()
            floor = sum(row["floor_us"] for row in rows) / 1e3
            axis.set_title(f"{title}: {at / 1e3:.2f} ms, floor {floor:.2f}", fontsize=9)
        axes[-1, 0].set_xlabel("µs; blue: reading its bytes at 4.23 TB/s")
        axes[-1, 0].set_xlim(right=1.25 * axes[-1, 0].get_xlim()[1])
        figure.tight_layout()


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['part']} x {row['launches']}" if row["launches"] > 1 else str(row["part"])


def waterfall() -> None:
    """One step at batch 1, kernel by kernel: its time, the bytes that it must read, their floor, and the ratio.

        python -m benchmarks.trace waterfall --model DIR/target --eagle3 DIR/eagle3 --shape 3,1,4 [--picture P.png]

    Kernels of the same part in the same place (the 32 ``o`` projections of the target) are one bar with their total
    time, counted as in ``benchmarks.trace``; the gaps follow the last bar. Bytes are those of weights and KV
    cache. Only for Llama-3.1-8B's shapes and its EAGLE-3 draft in bfloat16.
    """
    parser = load_options(waterfall.__doc__)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--shape", default="3,1,4", help="off, or steps,topk,tokens")
    parser.set_defaults(draft_quantization="none")
    parser.add_argument("--picture", type=Path)
    args = parse_load(parser)
    if not applies(args):
        raise SystemExit("--model: bytes are known of Llama-3.1-8B's shapes on an H200 alone")
    shape = parse_shape(args.shape)
    with open_llm(args, shape, 1) as llm:
        steps, _ = trace_steps(llm, make_prompts(args, 1), args.new_tokens)
    rows = bars(steps, args.prompt_tokens + args.new_tokens // 2)
    print("\n".join(lines(rows)))
    print(write_results("waterfall", {"shape": args.shape, "layers": LAYERS, "bars": rows}, args.output))
    if args.picture:
        waterfall_picture([(f"{args.shape} at batch 1", rows)], args.picture)


if __name__ == "__main__":
    run_command(main, waterfall)
