"""A projection with selected rows of a weight. Shapes: T tokens, O rows of the weight, I inputs, R selected rows."""

from __future__ import annotations

from torch import Tensor


def indexed_linear(x_TI: Tensor, weight_OI: Tensor, ids_R: Tensor) -> Tensor:
    """Return ``x @ weight[ids].T``, ``[T, R]``. ``ids``: int64 from 0 to O - 1, in any order; repeated ids give
    repeated columns. Rows of x may be strided."""
    return x_TI @ weight_OI[ids_R].T
