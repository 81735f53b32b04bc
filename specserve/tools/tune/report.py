"""What was found, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specserve.tools.tune.board import Board, controller_overall, overall
from specserve.tools.tune.grid import Candidate, name
from specserve.tools.tune.loop import Run
from specserve.tools.tune.search import pick_overall

SHOWN = 8  # candidates that were only predicted, in a table
STEADY = 1.3  # times its slower quarter is what plain decoding may have in its faster one
DIFFERENT = 0.97  # a pick that is worse than this over all batch sizes leaves something to the controller
HEADER = f"  {'steps, topk, tokens':20} {'ms/step':>8} {'accepted':>8} {'tokens/s':>9} {'x plain':>8}"
METRIC = (
    "tokens a second of all requests together, batch kept full, prefill excluded; accepted: tokens a step gives a\n"
    "request, bonus included; x plain: median over repeats, for all recorded requests; *: predicted, not run"
)


def text(boards: Sequence[Board]) -> str:
    return "\n".join([METRIC, *(line for board in boards for line in _table(board)), "", *verdict(boards)])


def verdict(boards: Sequence[Board]) -> list[str]:
    """The picks, in words."""
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
            f"Batch sizes want different shapes: any one loses {1 - share:.0%} or more to the best of each."
        )
    if share < DIFFERENT if controlled is None else share < controlled:
        lines.append(
            "The controller, --speculative-adaptive instead of a shape, chooses at each step: it is the better answer."
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
    """All measurements and predictions, and the picks; a shape is a list of steps, topk and tokens, null is plain."""
    return {
        "metric": " ".join(METRIC.split("; ")[0].split()),
        "pick": pick_overall(boards),
        "batches": [
            {
                "batch": board.batch,
                "best": board.best(),
                "controller": _controlled(board),
                "shapes": [_entry(board, c) for c in board.ranked()],
            }
            for board in boards
        ],
    }


def _entry(board: Board, candidate: Candidate) -> dict[str, Any]:
    measured = board.is_measured(candidate)
    run = board.run(candidate) if measured else None
    return {
        "shape": candidate,
        "predicted": {
            "step_ms": board.predicted_seconds(candidate) * 1e3,
            "accepted_length": board.estimates[board.shapes[candidate]].tokens,
            "tokens_per_second": board.predicted_rate(candidate),
            "ratio_to_plain": board.predicted_ratio(candidate),
        },
        "measured": run and _measured(run, board.ratio(candidate)),
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
    predicted = 0
    for candidate in board.ranked():
        measured = board.is_measured(candidate)
        predicted += not measured
        if measured or predicted <= SHOWN:
            yield _row(board, candidate, measured)
    if (ratio := board.controller_ratio()) is not None:
        run = sum(board.controller.values(), Run())
        yield _line(" ", "controller", (run.step_ms, run.accepted_length, run.rate, ratio))
    if predicted > SHOWN:
        yield f"  and {predicted - SHOWN} more, predicted slower"


def _row(board: Board, candidate: Candidate, measured: bool) -> str:
    run, estimate = (board.run(candidate) if measured else None), board.estimates[board.shapes[candidate]]
    ms = run.step_ms if run else board.predicted_seconds(candidate) * 1e3
    length = run.accepted_length if run else estimate.tokens
    rate = run.rate if run else board.predicted_rate(candidate)
    figures = ms, length, rate, board.ratio(candidate)
    best = "  <- best" if candidate == board.best() else ""
    return _line(" " if measured else "*", name(candidate), figures) + best


def _line(mark: str, what: str, figures: tuple[float, float, float, float]) -> str:
    ms, length, rate, ratio = figures
    return f"{mark} {what:20} {ms:8.2f} {length:8.2f} {rate:9.1f} {ratio:8.2f}"


def _named(board: Board, candidate: Candidate) -> str:
    if candidate is None:
        return "plain decoding"
    return f"{name(candidate)}, {board.ratio(candidate):.2f} times plain decoding"
