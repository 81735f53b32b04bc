"""Draws the curves of training logs.

    python -m examples.bundled_model.plot_loss --output loss.png RUN/train_log.jsonl [...]

One picture; each log gives a line for every chosen metric that it has.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

DEFAULT = ["loss", "heldout_dialogue", "heldout_text", "match_1", "match_5"]


def read(path: Path, metric: str) -> tuple[list[float], list[float]]:
    """Millions of tokens seen and the metric's values."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(record["tokens"] / 1e6, record[metric]) for record in records if metric in record]
    return [tokens for tokens, _ in found], [value for _, value in found]


def run_name(log: Path) -> str:
    """What a log is of: its own name, or its directory's for a plain ``train_log.jsonl``."""
    return log.parent.name if log.stem == "train_log" else log.stem


def smooth(values: list[float], weight: float) -> list[float]:
    """Exponential moving average."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else weight * out[-1] + (1 - weight) * value)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--metrics", nargs="+", default=DEFAULT)
    parser.add_argument("--smoothing", type=float, default=0.8, help="of metrics logged often, 0 to 1")
    args = parser.parse_args()
    losses = [name for name in args.metrics if not name.startswith("match")]
    matches = [name for name in args.metrics if name.startswith("match")]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), dpi=120)
    for axis, names, title in zip(
        axes, (losses, matches), ("loss", "share guessed as the target"), strict=True
    ):
        for log in args.logs:
            for name in names:
                tokens, values = read(log, name)
                if values:
                    weight = 0.0 if name.startswith("heldout") else args.smoothing
                    axis.plot(tokens, smooth(values, weight), label=f"{run_name(log)} {name}", linewidth=1)
        axis.set(xlabel="million tokens", title=title)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
        else:
            axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(args.output)


if __name__ == "__main__":
    main()
