"""Lookahead decoding: the target itself guesses ahead, by Jacobi iteration, in the pass that verifies.

Fu et al. 2024, arXiv 2402.02057. Each tree holds a window of N - 1 generations of W tokens. The first is the root and
guesses of the tokens after it; the later guesses of its column hang, as a chain, below each of them. What the target
chooses after the newest generation is the next one, and makes each column an n-gram of a pool, as the text does. Those
that begin with the root are in the tree as well. A path through either may be accepted.

Shapes: B slots, G generations, W columns, N tokens of an n-gram, D = N - 1, P n-grams of a slot's pool, K of them that
are considered, Q verified, E entries of a tree's pool, F of them in the window, T nodes, S levels, X n-grams to add, R
state rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from specserve_kernels import Accepted, Pool, Tree
from torch import Tensor
from torch.nn.functional import pad

from specserve.methods import DraftSettings, Lookahead
from specserve.models.base import TargetModel
from specserve.speculation.context import Context, PromptTokens, TargetStates, View
from specserve.speculation.drafters.ngram import NgramDrafter, best_of, predicted, scores_of
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape

NGRAMS = 4096  # of each slot's pool
CONSIDERED = 8  # n-grams considered for each one that is verified, since many are repetitions


@dataclass(frozen=True, slots=True)
class LookaheadTable:
    """The windows of lookahead decoding, the oldest generation first, and the latest P n-grams, each of N tokens. The
    n-gram added as number n is at place n modulo P; prefill has filled all places. -1: no token."""

    window_RGW: Tensor  # int64
    ngrams_RNP: Tensor  # int32
    added_R: Tensor  # int64, n-grams added since prefill

    @classmethod
    def empty(cls, rows: int, sizes: Lookahead, device: torch.device) -> LookaheadTable:
        window_RGW = torch.zeros(rows, sizes.generations, sizes.window, dtype=torch.int64, device=device)
        ngrams_RNP = torch.full((rows, sizes.ngram, NGRAMS), -1, dtype=torch.int32, device=device)
        return cls(window_RGW, ngrams_RNP, torch.zeros(rows, dtype=torch.int64, device=device))


class LookaheadDrafter(NgramDrafter):
    """Its table has the slots' windows and n-grams."""

    table: LookaheadTable

    def __init__(self, name: str, vocab_size: int, sizes: Lookahead) -> None:
        super().__init__(name, vocab_size)
        self._sizes = sizes

    @classmethod
    def load(cls, draft: DraftSettings, target: TargetModel) -> LookaheadDrafter:
        """Return a drafter for the target's vocabulary; there are no files to read."""
        assert draft.drafts.lookahead is not None
        return cls(draft.name, target.config.vocab_size, draft.drafts.lookahead)

    def allocate(self, rows: int, device: torch.device) -> None:
        self.table = LookaheadTable.empty(rows, self._sizes, device)

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        """Begin anew: the pool holds the text's last n-grams, the window the text's end."""
        sizes, table, rows_B = self._sizes, self.table, view.slots.rows_B
        ahead_X = torch.arange(-NGRAMS - sizes.generations + 1, 1, device=rows_B.device)
        token_BX = _read(context, rows_B, prompts.end_B[:, None] + ahead_X)
        table.ngrams_RNP[rows_B] = token_BX.unfold(1, sizes.ngram, 1).transpose(1, 2)
        table.added_R.index_fill_(0, rows_B, 0)  # an assigned number would be copied from the host
        end_BX = token_BX[:, 1 - sizes.window - sizes.generations :].clamp(min=0)
        table.window_RGW[rows_B] = end_BX.unfold(1, sizes.window, 1).long()

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        rows_B, entries = view.slots.rows_B, _entries(self._sizes, view.slots.rows_B.device)
        guess_BQD, score_BQD = self._guesses(context, view, entries)
        window_BF = self.table.window_RGW[rows_B].flatten(1)[:, 1:]
        first_B1 = self._windowed(context, view, shape)[:, None].to(score_BQD.dtype).log()  # 0 or -inf
        token_BE = torch.cat([window_BF, guess_BQD.flatten(1)], 1)
        score_BE = torch.cat([first_B1.expand_as(window_BF), score_BQD.flatten(1)], 1)
        # Entries of the same path become one, the first.
        path_BES = pad(token_BE, (0, 1), value=-1)[:, entries.paths_ES]
        same_BEE = (path_BES[:, :, None] == path_BES[:, None]).all(-1)
        twin_BE = (same_BEE & (score_BE > -torch.inf)[:, None]).long().argmax(-1)
        return Pool(
            tokens_BP=token_BE,
            parents_BP=pad(twin_BE, (0, 1), value=-1)[:, entries.parents_E],
            depths_BP=entries.depths_E.expand_as(twin_BE),
            scores_BP=score_BE.where(twin_BE == entries.index_E, -torch.inf),
            levels=self._sizes.shape[0],
            is_chain=False,
        )

    def _windowed(self, context: Context, view: View, shape: StepShape) -> Tensor:
        """Return which slots have their windows in the tree ``[B]``: all that may draft so many nodes and go so deep,
        if the step's nodes suffice for all of these. A window is never cut."""
        sizes, tables, slots = self._sizes, context.state.slots, view.slots
        nodes = sizes.generations * sizes.window - 1
        room_B = tables.limit[slots.rows_B] - slots.length_B
        wanted_B = (tables.draft_cap[slots.rows_B] >= nodes) & (room_B >= sizes.generations + sizes.window)
        return wanted_B & (wanted_B.sum() * nodes <= shape.nodes - shape.slots)

    def _guesses(self, context: Context, view: View, entries: _Entries) -> tuple[Tensor, Tensor]:
        """Return what follows the root in the latest different n-grams that begin with it, and the cumulative
        log-probabilities ``[B, Q, D]``, -inf: none. The best comes first. A predicted text is one more n-gram."""
        sizes, table, rows_B = self._sizes, self.table, view.slots.rows_B
        age_BP = (torch.arange(NGRAMS, device=rows_B.device) - table.added_R[rows_B][:, None]) % NGRAMS
        begins_BP = table.ngrams_RNP[rows_B, 0] == view.slots.root_B[:, None]
        found_BK, place_BK = age_BP.where(begins_BP, -1).topk(CONSIDERED * sizes.guesses)
        gram_BKD = table.ngrams_RNP[rows_B[:, None], 1:, place_BK].long()
        same_BKK = (gram_BKD[:, :, None] == gram_BKD[:, None]).all(-1)
        fresh_BK = (found_BK >= 0) & ~same_BKK.tril(-1).any(-1)
        found_BQ, index_BQ = found_BK.where(fresh_BK, -1).topk(sizes.guesses)
        guess_BQD = gram_BKD.take_along_dim(index_BQ[..., None], 1)
        score_QD = entries.scores_QD.to(context.state.sampling.temperature.dtype)
        score_BQD = score_QD.where(found_BQ[..., None] >= 0, -torch.inf)
        prediction = view.prediction(context)
        if prediction is None:
            return guess_BQD, score_BQD
        given_BD, trust_BD = predicted(prediction, rows_B, sizes.generations, score_QD.dtype)
        guess_BXD = torch.cat([given_BD[:, None], guess_BQD], 1)
        return best_of(guess_BXD, torch.cat([trust_BD[:, None], score_BQD], 1), sizes.guesses)

    def commit(self, context: Context, view: View, accepted: Accepted, states: TargetStates) -> Tensor | None:
        """Add the n-grams of the emitted tokens and, where the tree had the window, those of its columns."""
        assert states.nodes is not None
        tree, chosen_T = states.nodes
        sizes, table, root_B = self._sizes, self.table, tree.q_start[:-1]
        rows_B = tree.rows_T[root_B]
        before_D = torch.arange(1 - sizes.generations, 1, device=rows_B.device)
        before_BD = _read(context, rows_B, tree.position_T[root_B][:, None] + before_D)
        gram_BXN = torch.cat([before_BD, accepted.token_BS], 1).unfold(1, sizes.ngram, 1)
        live_BX = accepted.token_BS >= 0
        if tree.levels:
            window_BGW = table.window_RGW[rows_B]
            next_BW = self._next(window_BGW, tree, chosen_T)
            done_B1 = (next_BW >= 0).all(1, keepdim=True)
            window_BGW[:, 0, 0] = tree.token_T[root_B]
            column_BNW = torch.cat([window_BGW, next_BW[:, None]], 1)
            table.window_RGW[rows_B] = column_BNW[:, 1:].where(done_B1[..., None], window_BGW)
            gram_BXN = torch.cat([column_BNW.transpose(1, 2), gram_BXN], 1)
            live_BX = torch.cat([done_B1.expand_as(next_BW), live_BX], 1)
        number_BX = table.added_R[rows_B][:, None] + live_BX.cumsum(1)
        row_BX = rows_B[:, None].where(live_BX, context.state.dummy)
        # Padding's row gets the others. They must begin with no token: while steps are measured, it drafts as well.
        gram_BXN = gram_BXN.where(live_BX[..., None], -1)
        table.ngrams_RNP[row_BX, :, (number_BX - 1) % NGRAMS] = gram_BXN.int()
        table.added_R[rows_B] = number_BX[:, -1]
        return None

    def _next(self, window_BGW: Tensor, tree: Tree, chosen_T: Tensor) -> Tensor:
        """Return the tokens chosen after the newest generation ``[B, W]``, -1 where it was not in the tree. Its nodes
        are found by their paths."""
        slots, _, width = window_BGW.shape
        newest_WS = _entries(self._sizes, chosen_T.device).newest_WS
        path_BWS = pad(window_BGW.flatten(1)[:, 1:], (0, 1), value=self.vocab_size)[:, newest_WS]
        same_TW = (tree.path_TA[:, None] == path_BWS[tree.slot_T.clamp(max=slots - 1)]).all(-1)
        place_TW = tree.slot_T[:, None] * width + torch.arange(width, device=chosen_T.device)
        place_TW = place_TW.where(same_TW, slots * width)  # like those of unused nodes, not read
        next_X = chosen_T.new_full(((slots + 1) * width,), -1)
        next_X.scatter_(0, place_TW.flatten(), chosen_T.repeat_interleave(width))
        return next_X.view(slots + 1, width)[:slots]


class _Entries(NamedTuple):
    """The form of a pool: the window without the root, generation by generation, then the n-grams one by one. Paths go
    from an entry up to the root; they are padded with E, and those of the newest generation with F. ``scores_QD``: of
    n-grams, each of which matches the text's last token."""

    scores_QD: Tensor
    index_E: Tensor
    parents_E: Tensor
    depths_E: Tensor
    paths_ES: Tensor
    newest_WS: Tensor


@cache
def _entries(sizes: Lookahead, device: torch.device) -> _Entries:
    """Cached, so that it is built outside any graph."""
    width, count, levels = sizes.window, sizes.generations * sizes.window - 1, sizes.shape[0]
    parents = [i - 1 if i < width - 1 else i - width for i in range(count)]
    for first in range(count, sizes.shape[2] - 1, sizes.generations):
        parents += [-1, *range(first, first + sizes.generations - 1)]
    paths: dict[int, list[int]] = {-1: []}
    for entry, parent in enumerate(parents):
        paths[entry] = [entry, *paths[parent]]

    def table(first: int, end: int, padding: int) -> list[list[int]]:
        return [[*paths[i], *[padding] * (levels - len(paths[i]))] for i in range(first, end)]

    size = len(parents)
    rows = range(size), parents, [len(paths[i]) for i in range(size)]
    tables = table(0, size, size), table(count - width, count, count)
    matched_QD = torch.arange(1, sizes.ngram).expand(sizes.guesses, -1)
    scores_QD = scores_of(matched_QD[None], torch.float64)[0].to(device)
    return _Entries(scores_QD, *(torch.tensor(each, device=device) for each in (*rows, *tables)))


def _read(context: Context, rows_B: Tensor, place_BX: Tensor) -> Tensor:
    """Return the texts' tokens at these positions, -1 before the beginning."""
    found_BX = context.state.slots.tokens[rows_B[:, None], place_BX.clamp(min=0)]
    return found_BX.masked_fill(place_BX < 0, -1)
