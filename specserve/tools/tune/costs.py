"""Step times of all shapes of a batch size from those of a few.

A step is one run of the target over its nodes, and its draft's levels one after the other. So its time is a curve over
nodes, plus a draft's fixed part, plus levels times what a level of that branching costs; these are fitted to the
shapes that were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specserve.speculation.shape import StepShape

SMOOTH = 0.02  # weight of the wish for a straight curve over nodes


def to_measure(shapes: Sequence[StepShape]) -> list[StepShape]:
    """The plain shape, and of each branching the extremes of levels and nodes and one in the middle."""
    picked = [shape for shape in shapes if not shape.levels]
    for branching in sorted({shape.branching for shape in shapes if shape.levels}):
        group = [shape for shape in shapes if shape.levels and shape.branching == branching]
        group.sort(key=lambda shape: (shape.levels, shape.nodes))
        few = [shape for shape in group if shape.levels == group[0].levels]
        many = [shape for shape in group if shape.levels == group[-1].levels]
        picked += [few[0], few[-1], group[len(group) // 2], many[0], many[-1]]
    return list(dict.fromkeys(picked))


def fill_in(measured: Mapping[StepShape, float], shapes: Sequence[StepShape]) -> dict[StepShape, float]:
    """Seconds of every shape: measured ones as they are, others by the fit."""
    knots = sorted({shape.nodes for shape in measured})
    branchings = sorted({shape.branching for shape in measured if shape.levels})
    seconds = np.array(list(measured.values()))
    design = np.array([_row(shape, knots, branchings) for shape in measured])
    bends = SMOOTH * _bends(knots, design.shape[1])
    found = np.linalg.lstsq(
        np.concatenate([design / seconds[:, None], bends / seconds.mean()]),
        np.concatenate([np.ones(len(seconds)), np.zeros(len(bends))]),
        rcond=None,
    )[0]
    least = float(seconds.min())
    return {
        shape: measured.get(shape, max(least, float(found @ _row(shape, knots, branchings))))
        for shape in shapes
    }


def _row(shape: StepShape, knots: Sequence[int], branchings: Sequence[int]) -> list[float]:
    """Weights of the knots around its nodes, one for drafting at all, its levels under its branching."""
    curve = [float(np.interp(shape.nodes, knots, np.eye(len(knots))[i])) for i in range(len(knots))]
    levels = [float(shape.levels) if shape.branching == branching else 0.0 for branching in branchings]
    return [*curve, float(shape.levels > 0), *levels]


def _bends(knots: Sequence[int], columns: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """A row for each inner knot: how far it lies off the line through its neighbours."""
    rows = np.zeros((max(0, len(knots) - 2), columns))
    for index, row in enumerate(rows):
        left, middle, right = knots[index : index + 3]
        share = (middle - left) / (right - left)
        row[index : index + 3] = share - 1, 1, -share
    return rows
