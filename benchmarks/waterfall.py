"""One step at batch 1, kernel by kernel: its time, the bytes that it must read, their floor, and the ratio.

    python -m benchmarks.waterfall --model DIR/target --eagle3 DIR/eagle3 --shape 3,1,4 [--picture P.png]
        [--before RESULTS.json] [--one-by-one]

Kernels of the same part in the same place (the 32 ``o`` projections of the target) are one bar with their total time,
counted as in ``benchmarks.step_trace``; the gaps follow the last bar. Bytes are those of weights and KV cache. Only for
Llama-3.1-8B's shapes and its EAGLE-3 draft in bfloat16. ``--before``: an earlier result, drawn above. ``--one-by-one``:
launches don't overlap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from specserve_kernels.ops import pdl as overlap

from benchmarks.common import load_options, make_prompts, open_llm, parse_load, write_results
from benchmarks.floors import HEAD_DIM, KV_HEADS, LAYERS, READ_BYTES_PER_S, Shape, applies
from benchmarks.step_trace import Event, kind_of, own_times, trace_steps

HIDDEN, INNER, VOCAB, DRAFT_VOCAB, QKV = 4096, 14336, 128256, 32000, 6144
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
    found, place = [], ""
    for index, kind in enumerate(kinds):
        if kind == "pairs":
            drafts = next((k for k in kinds[index:] if k in ("sampling", "tree")), "") == "sampling"
            place = "draft " if drafts else "store "
        elif kind == "tree":
            place = ""
        found.append(place + _part(kinds, index))
    return found


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
    rows = []
    for part in dict.fromkeys(names):
        at = [index for index, name in enumerate(names) if name == part]
        us = median(sum(time[index] for index in at) for time in times)
        floor = len(at) * floor_bytes(part, context)
        rows.append({"part": part, "launches": len(at), "us": us, "bytes": floor})
    whole = median(max(e.end for e in step) - step[0].start for step in equal)
    rows.append({"part": "gaps", "launches": 0, "us": whole - sum(row["us"] for row in rows), "bytes": 0})
    return [row | {"floor_us": row["bytes"] / READ_BYTES_PER_S * 1e6} for row in rows]


def lines(rows: Bars) -> list[str]:
    found = [f"{'part':24} {'launches':>8} {'us':>8} {'MB':>8} {'floor us':>8} {'ratio':>6}"]
    for row in (*rows, _sum(rows)):
        ratio = f"{row['us'] / row['floor_us']:6.2f}" if row["floor_us"] else ""
        counts = f"{row['launches']:8} {row['us']:8.1f} {row['bytes'] / 1e6:8.1f}"
        found.append(f"{row['part']:24} {counts} {row['floor_us']:8.1f} {ratio}")
    return found


def _sum(rows: Bars) -> dict[str, Any]:
    return {"part": "all"} | {
        name: sum(row[name] for row in rows) for name in ("launches", "us", "bytes", "floor_us")
    }


def picture(panels: Sequence[tuple[str, Bars]], path: Path) -> None:
    """A panel a result: bars begin where the one above ends, dark up to the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 0.6 + 0.22 * max(len(rows) for _, rows in panels)
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(9, height * len(panels)), sharex=True, squeeze=False
    )
    for axis, (title, rows) in zip(axes[:, 0], panels, strict=True):
        at = 0.0
        for index, row in enumerate(rows):
            axis.barh(index, row["us"], left=at, color="tab:orange")
            axis.barh(index, min(row["floor_us"], row["us"]), left=at, color="tab:blue")
            ratio = f", {row['us'] / row['floor_us']:.2f} x its floor" if row["floor_us"] else ""
            text = f" {row['us']:.0f} µs" + (f", {row['bytes'] / 1e6:.0f} MB" if row["bytes"] else "") + ratio
            axis.text(at + row["us"], index, text, va="center", fontsize=7)
            at += row["us"]
        axis.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=7)
        axis.invert_yaxis()
        axis.set_title(
            f"{title}: {at / 1e3:.2f} ms, floor {sum(row['floor_us'] for row in rows) / 1e3:.2f}", fontsize=9
        )
    axes[-1, 0].set_xlabel("µs; blue: reading its bytes at 4.23 TB/s")
    axes[-1, 0].set_xlim(right=1.25 * axes[-1, 0].get_xlim()[1])
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['part']} x {row['launches']}" if row["launches"] > 1 else str(row["part"])


def main() -> None:
    parser = load_options(__doc__)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--shape", default="3,1,4", help="off, or steps,topk,tokens")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--one-by-one", action="store_true")
    parser.set_defaults(draft_quantization="none")
    parser.add_argument("--picture", type=Path)
    args = parse_load(parser)
    if not applies(args.model):
        raise SystemExit("--model: bytes are known of Llama-3.1-8B's shapes on an H200 alone")
    numbers = [] if args.shape == "off" else [int(part) for part in args.shape.split(",")]
    shape: Shape | None = (numbers[0], numbers[1], numbers[2]) if numbers else None
    apart = mock.patch.object(overlap, "overlap_on", return_value={"OVERLAP": False})
    with apart if args.one_by_one else nullcontext(), open_llm(args, shape, 1) as llm:
        steps, _ = trace_steps(llm, make_prompts(args, 1), args.new_tokens)
    rows = bars(steps, args.prompt_tokens + args.new_tokens // 2)
    print("\n".join(lines(rows)))
    print(write_results("waterfall", {"shape": args.shape, "layers": LAYERS, "bars": rows}, args.output))
    if args.picture:
        before = (
            []
            if args.before is None
            else [("before", json.loads(args.before.read_text())["figures"]["bars"])]
        )
        picture([*before, (f"{args.shape} at batch 1", rows)], args.picture)


if __name__ == "__main__":
    main()
