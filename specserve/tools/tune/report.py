"""The results of the search, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

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
