"""Suffix decoding and REST: copied from the request's own text, and from earlier answers or from a file of texts.

Oliaro et al. 2024, arXiv 2411.04975; He et al. 2023, arXiv 2311.08252. The request's own text is looked up on the
device, in the step. The others are the host's: it says, one step late, what a text goes on with, and a step takes from
that what has not been emitted meanwhile, while what was emitted agrees.

Shapes: B slots, K continuations, S levels.
"""

from __future__ import annotations

import torch
from specserve_kernels import follow_continuation
from torch import Tensor

from specserve.speculation.context import Context, DrafterNeeds, View
from specserve.speculation.drafters.ngram import NgramDrafter, best_of, scores_of

LONGEST = 64  # tokens that the host hands over at a time


class SuffixDrafter(NgramDrafter):
    """Proposes the best of both, one continuation for each token that may come next."""

    needs = DrafterNeeds(continuation=LONGEST)

    def branches(self, context: Context, view: View, count: int, size: int) -> tuple[Tensor, Tensor]:
        token_BKS, score_BKS = super().branches(context, view, count, size)
        table, slots = context.state.continuations, view.slots
        assert table is not None
        text_RC = context.state.slots.tokens[:, : view.max_length + 1]
        told_BS, matched_BS = follow_continuation(table, text_RC, slots.rows_B, slots.length_B, size)
        told_B1S = scores_of(matched_BS[:, None], score_BKS.dtype)
        # Of two that begin with the same token the better one stays.
        same_BK = (token_BKS[:, :, 0] == told_BS[:, :1]) & score_BKS[:, :, 0].isfinite()
        better_BK = told_B1S[:, :, 0] > score_BKS[:, :, 0]
        told_B1S = told_B1S.masked_fill((same_BK & ~better_BK).any(1)[:, None, None], -torch.inf)
        score_BKS = score_BKS.masked_fill((same_BK & better_BK)[:, :, None], -torch.inf)
        return best_of(
            torch.cat([told_BS[:, None], token_BKS], 1), torch.cat([told_B1S, score_BKS], 1), count
        )
