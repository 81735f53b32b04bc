"""Pictures of results for the docs.

python -m benchmarks.plots [--results benchmarks/results/throughput.json] [--output docs/images/throughput.png]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "throughput.json")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "throughput.png")
    args = parser.parse_args()
    plot_throughput(json.loads(args.results.read_text())["figures"], args.output)
    print(args.output)


if __name__ == "__main__":
    main()
