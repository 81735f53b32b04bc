"""Prompt lookup: find what followed a text's last tokens where they occurred earlier (Saxena 2023, "Prompt lookup
decoding").

Shapes as in ``types``; K continuations of S tokens each, C = the table's columns that are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_MATCHED = 16  # longest match, in tokens


def find_continuations(
    tokens_RC: Tensor, rows_B: Tensor, length_B: Tensor, taken_B: Tensor, count: int, size: int
) -> tuple[Tensor, Tensor]:
    """Return the ``count`` best continuations of each text ``[B, K, S]`` and how many tokens matched ``[B, K]``, 0:
    none.

    A text ends with position ``length_B``. A continuation begins after an earlier place where the preceding tokens
    equal the end of the text. The best has the longest match, up to ``MOST_MATCHED``; ties go to the latest place.
    First tokens differ from each other and from ``taken_B``. A continuation that reaches the text's end repeats from
    its own start, as a repeating text does.
    """
    columns, device = tokens_RC.shape[1], tokens_RC.device
    index_C = torch.arange(columns, device=device)
    text_BC = tokens_RC[rows_B]
    next_BC = torch.nn.functional.pad(text_BC[:, 1:], (0, 1), value=-1)
    agrees_BC, matched_BC = index_C < length_B[:, None], torch.zeros_like(text_BC, dtype=torch.int64)
    for back in range(min(MOST_MATCHED, columns)):
        own_B1 = text_BC.gather(1, (length_B[:, None] - back).clamp(min=0))
        own_B1 = own_B1.where(length_B[:, None] >= back, -2)
        earlier_BC = torch.nn.functional.pad(text_BC, (back, 0), value=-1)[:, :columns]
        agrees_BC = agrees_BC & (earlier_BC == own_B1)
        matched_BC += agrees_BC
    rank_BC = (matched_BC * columns + index_C).masked_fill(matched_BC == 0, -1)
    found, matched = [], []
    for _ in range(count):
        rank_BC = rank_BC.masked_fill(next_BC == taken_B[:, None], -1)
        best_B, at_B = rank_BC.max(1)
        ahead_BS = torch.arange(size, device=device) % (length_B - at_B).clamp(min=1)[:, None]
        found.append(text_BC.gather(1, (at_B[:, None] + 1 + ahead_BS).clamp(max=columns - 1)).long())
        matched.append(torch.where(best_B >= 0, best_B // columns, 0))
        taken_B = next_BC.gather(1, at_B[:, None])[:, 0].where(best_B >= 0, taken_B)
    return torch.stack(found, 1), torch.stack(matched, 1)
