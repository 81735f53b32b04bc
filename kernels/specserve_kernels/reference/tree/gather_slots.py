"""Gather the state that a step reads of its slots. Shapes: B slots of the batch, R rows of the state's tables, G page
tables of M pages a slot."""

from __future__ import annotations

from torch import Tensor


def gather_slots(
    rows_B: Tensor, root_R: Tensor, length_R: Tensor, pages_GRM: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rows' root tokens, lengths, lengths with the root, and pages ``[G, B, M]``. All are int64; rows must
    be within the table."""
    length_B = length_R[rows_B]
    return root_R[rows_B], length_B, length_B + 1, pages_GRM[:, rows_B]
