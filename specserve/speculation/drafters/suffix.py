"""Suffix decoding and REST: text copied from the request itself, and from earlier answers or a file.

Oliaro et al. 2024, arXiv 2411.04975; He et al. 2023, arXiv 2311.08252. The request's own text is searched on the
device, within the step. The host searches the other texts and sends a continuation one step late. A step uses the part
of it that is not emitted yet, as long as the tokens emitted meanwhile agree with it.

Shapes: B slots, K continuations, S levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from specserve_kernels import Continuations, follow_continuation
from torch import Tensor

from specserve.speculation.context import Context, View
from specserve.speculation.drafters.ngram import NgramDrafter, best_of, scores_of
from specserve.speculation.state import Continuation, to_device

LONGEST = 64  # most tokens of a continuation that the host sends


class SuffixDrafter(NgramDrafter):
    """Proposes the best continuations of both sources, at most one for each possible next token."""

    continuation = LONGEST
    _table: Continuations

    def allocate(self, rows: int, device: torch.device) -> None:
        self._table = Continuations.empty(rows, LONGEST, device)

    def admit(self, rows_N: Tensor) -> None:
        self._table.length_R.index_fill_(0, rows_N, 0)

    def set_continuations(self, continuations: Sequence[Continuation]) -> None:
        numbers = [[each.slot, len(each.tokens), each.base, each.matched] for each in continuations]
        tokens = [[*each.tokens, *[0] * (LONGEST - len(each.tokens))] for each in continuations]
        packed = [*chain.from_iterable(map(chain, numbers, tokens))]
        packed_NX = to_device(packed, self._table.length_R.device).view(len(continuations), -1)
        rows_N1, given_N3, token_NP = packed_NX.split([1, 3, LONGEST], dim=1)
        self._table.write(rows_N1[:, 0], given_N3, token_NP)

    def branches(self, context: Context, view: View, count: int, size: int) -> tuple[Tensor, Tensor]:
        token_BKS, score_BKS = super().branches(context, view, count, size)
        table, slots = self._table, view.slots
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
