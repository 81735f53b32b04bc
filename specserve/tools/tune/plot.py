"""Plot the speed of the measured shapes, one panel per batch size."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from specserve.tools.tune.board import Board
from specserve.tools.tune.grid import name


def check_plot() -> None:
    """Raise ValueError if matplotlib is missing, before the measurements rather than after."""
    if find_spec("matplotlib") is None:
        raise ValueError(
            "--plot needs the package matplotlib, which is not installed: pip install matplotlib"
        )


def plot(boards: Sequence[Board], path: Path) -> None:
    """Draw a bar per measured shape, best on top, labelled with its tokens per second. Raises ValueError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(boards), figsize=(5 * len(boards), 5), squeeze=False)
    for board, axes in zip(boards, panels[0], strict=True):
        measured = board.ranked()[::-1]
        colors = ["C1" if c == board.best() else "grey" if c is None else "C0" for c in measured]
        bars = axes.barh([name(c) for c in measured], [board.ratio(c) for c in measured], color=colors)
        axes.bar_label(bars, [f"{board.run(c).rate:.0f}/s" for c in measured], padding=2)
        axes.set_title(f"batch {board.batch}")
        axes.set_xlabel("times plain decoding (right: tokens a second)")
        axes.margins(x=0.15)
    panels[0][0].set_ylabel("steps, topk, tokens")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot: {path} can't be written: {error}") from None
    pyplot.close(figure)
