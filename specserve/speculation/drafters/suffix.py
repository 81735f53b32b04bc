"""Suffix decoding and REST: text copied from the request itself, and from earlier answers or a file.

Oliaro et al. 2024, arXiv 2411.04975; He et al. 2023, arXiv 2311.08252. The request's own text is searched on the
device, within the step. The host searches the other texts and sends a continuation one step late. A step uses the part
of it that is not emitted yet, as long as the tokens emitted meanwhile agree with it.

Shapes: B slots, K continuations, S levels.
"""

from __future__ import annotations

import torch
from specserve_kernels import follow_continuation
from torch import Tensor

from specserve.speculation.context import Context, DrafterNeeds, View
from specserve.speculation.drafters.ngram import NgramDrafter, best_of, scores_of

LONGEST = 64  # most tokens of a continuation that the host sends


class SuffixDrafter(NgramDrafter):
    """Proposes the best continuations of both sources, at most one for each possible next token."""

    needs = DrafterNeeds(continuation=LONGEST)

    def branches(self, context: Context, view: View, count: int, size: int) -> tuple[Tensor, Tensor]:
        token_BKS, score_BKS = super().branches(context, view, count, size)
        table, slots = context.state.continuations, view.slots
        assert table is not None
        text_RC = context.state.slots.tokens[:, : view.max_length + 1]
        host_BS, matched_BS = follow_continuation(table, text_RC, slots.rows_B, slots.length_B, size)
        host_score_B1S = scores_of(matched_BS[:, None], score_BKS.dtype)
        # Where two begin with the same token, keep the better one.
        same_BK = (token_BKS[:, :, 0] == host_BS[:, :1]) & score_BKS[:, :, 0].isfinite()
        better_BK = host_score_B1S[:, :, 0] > score_BKS[:, :, 0]
        host_score_B1S = host_score_B1S.masked_fill((same_BK & ~better_BK).any(1)[:, None, None], -torch.inf)
        score_BKS = score_BKS.masked_fill((same_BK & better_BK)[:, :, None], -torch.inf)
        return best_of(
            torch.cat([host_BS[:, None], token_BKS], 1), torch.cat([host_score_B1S, score_BKS], 1), count
        )
