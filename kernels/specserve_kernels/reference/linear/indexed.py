"""A projection with some rows of a weight. Shapes: T tokens, O rows of the weight, I inputs, R rows picked."""

from __future__ import annotations

from torch import Tensor


def indexed_linear(x_TI: Tensor, weight_OI: Tensor, ids_R: Tensor) -> Tensor:
    """``x @ weight[ids].T``, ``[T, R]``. ``ids`` int64, each from 0 to O - 1, in any order; repeated ones give
    repeated columns. Rows of x may be further apart than I."""
    return x_TI @ weight_OI[ids_R].T
