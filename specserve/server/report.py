"""The speculation part of ``/server_info``: the same figures as ``/metrics``."""

from __future__ import annotations

from typing import Any

from specserve.messages import CostTotals, Stats, StepTotals


def speculation_report(stats: Stats | None) -> dict[str, Any] | None:
    """Return the figures since start, and the latest step's shape. None before the engine's first step."""
    if stats is None or stats.step_totals.shape is None:
        return None
    totals = stats.step_totals
    return {
        "drafter": totals.drafter,
        "shape": totals.shape,
        "share_of_steps": _shares(totals),
        "acceptance_by_level": [round(level.accepted / max(level.tested, 1), 4) for level in totals.levels],
        "speed_up": _speed_up(totals, totals.cost) if totals.cost is not None else None,
    }


def _shares(totals: StepTotals) -> dict[str, float]:
    steps = sum(shape.steps for shape in totals.shapes.values())
    return {label: round(shape.steps / steps, 4) for label, shape in sorted(totals.shapes.items())}


def _speed_up(totals: StepTotals, cost: CostTotals) -> float:
    """Return the speed-up over plain decoding, by the cost model."""
    seconds = sum(shape.seconds for shape in totals.shapes.values())
    return round(cost.plain_seconds / max(seconds, 1e-9), 4)
