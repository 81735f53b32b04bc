"""Draw the docs' pictures of results.

python -m benchmarks.plots [--only throughput changing_load] [--results benchmarks/results] [--output docs/images]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.results import options

Rows = Sequence[dict[str, Any]]
MARKERS = {"SGLang": "x", "vLLM": "+"}


def plot_throughput(rows: Rows, path: Path) -> None:
    """Tokens a second against batch size, a colour a shape; floors and peers at our accepted length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    shapes = list(dict.fromkeys(_name(row) for row in rows))
    for index, name in enumerate(shapes):
        _draw(axes, [row for row in rows if _name(row) == name], name, f"C{index}")
    axes.plot([], [], "--", color="grey", label="floor")
    for peer, marker in MARKERS.items():
        axes.plot([], [], marker, color="grey", label=f"{peer}, at our accepted length")
    _finish(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _draw(axes: Any, rows: Rows, name: str, color: str) -> None:
    axes.plot(
        [r["batch"] for r in rows], [r["tokens_per_second"] for r in rows], "o-", color=color, label=name
    )
    floors = [(r["batch"], _rate(r, r["floor_ms"])) for r in rows if r["floor_ms"] is not None]
    if floors:
        axes.plot(*zip(*floors, strict=True), "--", color=color, linewidth=1)
    for row in rows:
        for peer, ms in row["peers_ms"].items():
            axes.plot(row["batch"], _rate(row, ms), MARKERS[peer], color=color)


def _finish(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("requests in the batch")
    axes.set_ylabel("tokens a second")
    axes.grid(alpha=0.3)
    axes.legend()


def _name(row: dict[str, Any]) -> str:
    return "off" if row["shape"] is None else "EAGLE-3 ({}, {}, {})".format(*row["shape"])


def _rate(row: dict[str, Any], ms: float) -> float:
    """Tokens a second of the same steps, had each taken ``ms``: requests end at different times in both."""
    rate: float = row["tokens_per_second"] * row["ms_per_step"] / ms
    return rate


KIND_COLORS = {"code": "tab:blue", "dialogue": "tab:green", "random": "tab:red"}


def plot_changing_load(figures: dict[str, Any], path: Path) -> None:
    """Over time: requests, the controller's shapes, accepted length and tokens a second, its and plain decoding's.
    After them the stages, a colour a kind of text, the darker the more requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ours, off = figures["policies"]["adaptive"], figures["policies"]["off"]
    figure, axes = pyplot.subplots(
        4, figsize=(12, 10), sharex=True, gridspec_kw={"height_ratios": [1, 2, 1, 2]}
    )
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
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color, alpha=0.3) for color in KIND_COLORS.values()]
    axes[0].legend(handles, list(KIND_COLORS), loc="upper right")
    axes[3].legend(loc="upper right")
    axes[3].set_xlabel("seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _stage_bands(axes: Any, stages: Rows) -> None:
    most = max(stage["requests"] for stage in stages)
    for stage in stages:
        alpha = 0.05 + 0.25 * stage["requests"].bit_length() / most.bit_length()
        axes.axvspan(stage["begin"], stage["end"], color=KIND_COLORS[stage["kind"]], alpha=alpha, linewidth=0)


def _line(axes: Any, windows: Rows, name: str, color: str, label: str | None) -> None:
    rows = [row for row in windows if row[name]]
    middles = [(row["begin"] + row["end"]) / 2 for row in rows]
    axes.plot(middles, [row[name] for row in rows], color=color, linewidth=1, label=label)


def _shape_marks(axes: Any, windows: Rows) -> None:
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


PICTURES: dict[str, Callable[[Any, Path], None]] = {
    "throughput": plot_throughput,
    "changing_load": plot_changing_load,
}


def main() -> None:
    parser = options(__doc__, output=False)
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()
    for name in args.only:
        results, output = args.results / f"{name}.json", args.output / f"{name}.png"
        PICTURES[name](json.loads(results.read_text())["figures"], output)
        print(output)


if __name__ == "__main__":
    main()
