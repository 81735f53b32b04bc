"""Continuations: each text's position within the continuation that the host proposed for it.

The host is at least one step late, so the tokens emitted meanwhile are compared with its proposal. Shapes as in
``types``; S tokens are wanted, P is the longest proposal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.types import Continuations


def follow_continuation(
    table: Continuations, tokens_RC: Tensor, rows_B: Tensor, length_B: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Return the next S tokens of each text ``[B, S]``, and how many tokens before each of them matched ``[B, S]``. The
    count includes tokens of the continuation. It is 0 where there is no token, also for a text, ending with position
    ``length_B``, that has left the continuation."""
    index_P = torch.arange(table.size, device=rows_B.device)
    base_B, count_B = table.base_R[rows_B], table.length_R[rows_B]
    at_B, said_BP = length_B - base_B, table.tokens_RP[rows_B]
    place_BP = (base_B[:, None] + 1 + index_P).clamp(max=tokens_RC.shape[1] - 1)
    agrees_BP = (tokens_RC[rows_B[:, None], place_BP] == said_BP) | (index_P >= at_B[:, None])
    alive_B = (at_B >= 0) & agrees_BP.all(1)
    at_BS = at_B[:, None] + torch.arange(size, device=rows_B.device)
    there_BS = alive_B[:, None] & (at_BS < count_B[:, None])
    token_BS = said_BP.gather(1, at_BS.clamp(0, table.size - 1)).long()
    return token_BS, torch.where(there_BS, table.matched_R[rows_B][:, None] + at_BS, 0)
