"""The results of the search: as text, as JSON, as a plot, and as the file for the server's ``--config``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specserve.config import SETTINGS, Settings
from specserve.config.speculation import SHAPE
from specserve.methods import NONE
from specserve.tools.files import replacing
from specserve.tools.tune.board import Board, controller_overall, overall, pick_overall
from specserve.tools.tune.grid import Candidate, name
from specserve.tools.tune.loop import Run

STEADY = 1.3  # on a steady machine, largest ratio between quartiles of plain decoding's speed
DIFFERENT = 0.97  # below this share of the best at each batch size, one shape for all loses too much
HEADER = f"  {'steps, topk, tokens':20} {'ms/step':>8} {'accepted':>8} {'tokens/s':>9} {'x plain':>8}"
METRIC = (
    "tokens per second of all requests together, batch kept full, prefill excluded; accepted: tokens per step of a\n"
    "request, bonus included; x plain: median over laps that answer the same requests"
)


def text(boards: Sequence[Board]) -> str:
    return "\n".join([METRIC, *(line for board in boards for line in _table(board)), "", *verdict(boards)])


def verdict(boards: Sequence[Board]) -> list[str]:
    """Return the picks in words."""
    pick = pick_overall(boards)
    each = [f"batch {board.batch}: {_named(board, board.best())}" for board in boards]
    if pick is None:
        lines = ["Nothing beats plain decoding over these batch sizes: leave speculation off."]
        lines += [line for line, board in zip(each, boards, strict=True) if board.best() is not None]
    else:
        ratios = ", ".join(f"{board.ratio(pick):.2f} at batch {board.batch}" for board in boards)
        lines = [f"Best overall: {name(pick)} (steps, topk, tokens); times plain decoding: {ratios}."]
        lines += each if len(boards) > 1 else []
    return [*lines, *_controller(boards, pick), *_unsteady(boards)]


def _controller(boards: Sequence[Board], pick: Candidate) -> list[str]:
    share, controlled = overall(boards, pick), controller_overall(boards)
    lines = []
    if controlled is not None:
        ratios = ", ".join(f"{board.controller_ratio():.2f} at batch {board.batch}" for board in boards)
        lines.append(
            f"The controller, --speculative-adaptive instead of a shape; times plain decoding: {ratios}."
        )
    if share < DIFFERENT:
        lines.append(
            f"Batch sizes need different shapes: any single one loses {1 - share:.0%} or more to the best of each."
        )
    if share < DIFFERENT if controlled is None else share < controlled:
        lines.append(
            "The controller, --speculative-adaptive instead of a shape, chooses at each step: prefer it."
        )
    return lines


def _unsteady(boards: Sequence[Board]) -> Iterator[str]:
    for board in boards:
        rates = board.plain_rates()
        if not rates:
            continue
        slow, fast = rates[len(rates) // 4], rates[-1 - len(rates) // 4]
        if fast > STEADY * slow:
            yield (
                f"batch {board.batch}: the machine was not steady, plain decoding gave {slow:.0f} to {fast:.0f} "
                "tokens/s: run again with nothing else running, or longer."
            )


def as_json(boards: Sequence[Board]) -> dict[str, Any]:
    """Return all measurements and the picks. A shape is a list of steps, topk and tokens; null is plain decoding."""
    return {
        "metric": " ".join(METRIC.split("; ")[0].split()),
        "pick": pick_overall(boards),
        "batches": [
            {
                "batch": board.batch,
                "best": board.best(),
                "controller": _controlled(board),
                "shapes": [{"shape": c, **_measured(board.run(c), board.ratio(c))} for c in board.ranked()],
            }
            for board in boards
        ],
    }


def _controlled(board: Board) -> dict[str, Any] | None:
    ratio = board.controller_ratio()
    return None if ratio is None else _measured(sum(board.controller.values(), Run()), ratio)


def _measured(run: Run, ratio: float) -> dict[str, Any]:
    return {
        "step_ms": run.step_ms,
        "accepted_length": run.accepted_length,
        "tokens_per_second": run.rate,
        "ratio_to_plain": ratio,
        "tokens": run.tokens,
        "seconds": run.seconds,
        "prefill_seconds": run.prefill_seconds,
        "steps": run.steps,
    }


def _table(board: Board) -> Iterator[str]:
    yield f"\nbatch {board.batch}"
    yield HEADER
    for candidate in board.ranked():
        best = "  <- best" if candidate == board.best() else ""
        yield _line(name(candidate), board.run(candidate), board.ratio(candidate)) + best
    if (ratio := board.controller_ratio()) is not None:
        yield _line("controller", sum(board.controller.values(), Run()), ratio)


def _line(what: str, run: Run, ratio: float) -> str:
    return f"  {what:20} {run.step_ms:8.2f} {run.accepted_length:8.2f} {run.rate:9.1f} {ratio:8.2f}"


def _named(board: Board, candidate: Candidate) -> str:
    if candidate is None:
        return "plain decoding"
    return f"{name(candidate)}, {board.ratio(candidate):.2f} times plain decoding"


def configuration(given: Settings, pick: Candidate) -> dict[str, Any]:
    """Return the settings that the user gave, without secrets, with the picked shape or without speculation."""
    kept = {
        setting.name: list(value) if isinstance(value, tuple) else value
        for setting in SETTINGS.values()
        if (value := getattr(given, setting.name)) != setting.default and not setting.secret
    }
    kept = {setting: value for setting, value in kept.items() if setting not in SHAPE}
    if pick is not None:
        return {**kept, **dict(zip(SHAPE, pick, strict=True))}
    drafting = [setting for setting in kept if setting.startswith("speculative_")]
    return {
        **{setting: value for setting, value in kept.items() if setting not in drafting},
        "speculative_algorithm": NONE,
    }


def write_configuration(path: Path, given: Settings, pick: Candidate, words: Sequence[str]) -> None:
    """Write the file, with ``words`` as comments. Raises ValueError naming the flag if it can't be written."""
    import yaml

    comments = "".join(f"# {line}\n" for line in ["Written by python -m specserve.tune.", *words])
    write(path, "--output", comments + yaml.safe_dump(configuration(given, pick), sort_keys=False))


def write(path: Path, flag: str, content: str) -> None:
    with replacing(flag, path) as partial:
        partial.write_text(content)


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
