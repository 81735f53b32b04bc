"""The data that drafting and verifying exchange: slots, levels, pools, trees, accepted paths, predictions.

Each holds a whole batch. Shapes: B slots in the batch, W nodes a slot that one draft forward runs (1 for the root's
level, then K), N = B * W, K branching, A tokens on the path after the root, P pool entries a slot, T packed nodes of
the whole batch (roots included), S draft levels, R state rows, G page tables of M pages a slot, C positions a slot,
H feature size. In
``Prediction``: P tokens that a prediction may have.

A *place* (int64) is where a token's cache entry belongs, whatever page holds it: a position among those of all slots of
the batch, one slot after the other; -1: of no slot, which is page 0. Pages are looked up where entries are written or
moved.

The nodes of a slot are contiguous: its root first, parents before children. A node's *local* index counts within its
slot. If the pools offer fewer than T - B live candidates, the remaining nodes have slot B and local index 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

MAX_NODES = 64  # ancestors of a node are the bits of one int64
RECENT = 4  # longest match, in tokens, by which a text that left its prediction is found in it again
LARGEST_FP8 = 448.0  # of float8_e4m3fn


class KVScales(NamedTuple):
    """Scales of a float8_e4m3fn cache: keys and values are its numbers times these."""

    key: float = 1.0
    value: float = 1.0


class Shared(NamedTuple):
    """What a rank's launches need to exchange. ``addresses``: int64 ``[N + 1]``, of the ranks' memory as this one sees
    it, zero at first, ``shared_bytes`` each; last, of three int64 of the host: ``stop``, a time that the host counts,
    and after how much of it a wait takes too long, 0 for never. ``counts``: int64 ``[P]``, zero at first."""

    rank: int
    addresses: Tensor
    counts: Tensor

    @property
    def ranks(self) -> int:
        return len(self.addresses) - 1


class Parts(NamedTuple):
    """A sum over ranks that the launch which reads it makes: this rank's part ``[T, H]``."""

    own_TH: Tensor
    shared: Shared


class HeadNorms(NamedTuple):
    """Root-mean-square norms of single heads before their rotation: weights of queries and of keys, None if there are
    no keys, in the heads' dtype or wider. ``values``: values are normalized, too, without a weight."""

    query_D: Tensor
    key_D: Tensor | None
    eps: float
    values: bool = False


@dataclass(frozen=True, slots=True)
class SlotTables:
    """The state of requests, one row a slot; the last row is padding's. ``root``: the token sampled last, at position
    ``length``, whose K and V are not computed yet. ``feature``: the feature of the token before it, from which it was
    predicted, for drafters that read the target's states. ``tokens``: the text, prompt included, up to ``length``."""

    root: Tensor  # [R] int64
    length: Tensor  # [R] int64, tokens whose K and V are in the pool
    feature: Tensor  # [R, H]
    tokens: Tensor  # [R, C] int32
    pages: Tensor  # [G, R, M] int64, page tables
    limit: Tensor  # [R] int64, most tokens the request may have, prompt included
    draft_cap: Tensor  # [R] int64, most nodes drafted for it in a step


@dataclass(frozen=True, slots=True)
class Slots:
    """The rows of one batch, gathered from the tables before a step."""

    rows_B: Tensor  # int64, state rows
    root_B: Tensor
    length_B: Tensor
    pages_GBM: Tensor  # contiguous
    page_size: int

    @property
    def pages_BM(self) -> Tensor:
        """Table 0, by whose pages features are kept."""
        return self.pages_GBM[0]

    @property
    def capacity(self) -> int:
        """Places of a slot."""
        return self.pages_GBM.shape[2] * self.page_size


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes that one draft forward runs, row-major by slot."""

    token_N: Tensor  # int64
    source_N: Tensor  # int64, row of the feature that each is drafted from
    rows_N: Tensor  # int64, state row
    position_N: Tensor  # int64
    place_N: Tensor  # int64, where their cache entries go
    score_BW: Tensor  # cumulative log-probability
    pool_BW: Tensor  # int64, own pool index, -1 for the root
    # int64, positions after the prefix that each node sees: those of its ancestors, then its own
    scratch_BWA: Tensor
    path_NA: Tensor  # int64, tokens after the root on the path to each, itself included

    @property
    def width(self) -> int:
        return self.score_BW.shape[1]


@dataclass(frozen=True, slots=True)
class Pool:
    """A drafter's candidates, parents before children. ``parents``: pool index of the parent, -1 for the root. Siblings
    carry different tokens; those of one source are ordered best first. Scores fall along every path; -inf means no
    candidate. ``levels``: the largest depth. ``is_chain``: entry i is the only child of entry i - 1. ``parts``: the
    pools that it was merged from, none for a pool of one source."""

    tokens_BP: Tensor  # int64
    parents_BP: Tensor  # int64
    depths_BP: Tensor  # int64, the root's children are at 1; rows may share memory
    scores_BP: Tensor  # cumulative log-probability
    levels: int
    is_chain: bool
    parts: tuple[Pool, ...] = ()

    @classmethod
    def of_tree(
        cls, slots: int, levels: int, branching: int, dtype: torch.dtype, device: torch.device
    ) -> Pool:
        """Return a pool for ``grow_level`` to fill: K candidates of the root, then K for each of K nodes a level."""
        size = tree_pool_size(levels, branching)
        tokens, parents = (torch.empty(slots, size, dtype=torch.int64, device=device) for _ in range(2))
        depths = _tree_depths(_table_levels(levels), branching, device)[:size].expand(slots, -1)
        scores = torch.empty(slots, size, dtype=dtype, device=device)
        return cls(tokens, parents, depths, scores, levels, is_chain=branching == 1)

    @classmethod
    def of_text(cls, token_BS: Tensor, score_BS: Tensor) -> Pool:
        """Return the chain of candidates that continues each slot's text; ``score_BS`` -inf: none."""
        return cls.of_branches(token_BS[:, None], score_BS[:, None])

    @classmethod
    def of_branches(cls, token_BKS: Tensor, score_BKS: Tensor) -> Pool:
        """Return K such chains a slot. Better chains must come first, and their first tokens must differ."""
        slots, branching, levels = token_BKS.shape
        tokens_BP, scores_BP = (each.transpose(1, 2).reshape(slots, -1) for each in (token_BKS, score_BKS))
        tables = _branches(_table_levels(levels), branching, token_BKS.device)
        parents_BP, depths_BP = (table[: levels * branching].expand(slots, -1) for table in tables)
        return cls(tokens_BP, parents_BP, depths_BP, scores_BP, levels, is_chain=branching == 1)


@dataclass(frozen=True, slots=True)
class Tree:
    """The nodes to verify, packed by slot, roots first; unused nodes have slot B. ``parent_T``: packed indices; a root
    is its own parent. ``depth_T`` and ``mask_T`` (bit j: local node j is an ancestor or the node itself; bit 63 is the
    sign) are derived from it. ``place_T``: -1 for unused nodes."""

    token_T: Tensor
    parent_T: Tensor
    slot_T: Tensor
    rows_T: Tensor  # state row; any valid one for unused nodes
    local_T: Tensor
    depth_T: Tensor
    mask_T: Tensor
    position_T: Tensor
    place_T: Tensor
    path_TA: Tensor  # [T, S], tokens on the path to each node without the root's, padded with V
    q_start: Tensor  # [B + 1]
    is_chain: bool  # every accepted node is already at its final slot
    parts: tuple[Pool, ...] = ()  # as in its pool

    @property
    def levels(self) -> int:
        """Largest possible depth of a node."""
        return self.path_TA.shape[1]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The walk down each tree, and the places of its cache entries: ``[B, S + 1]`` each, by depth, -1 after the end.

    *First choices* are nodes that come before their siblings, as do all their ancestors: what a chain would have
    drafted, as far as the tree holds it. The accepted ones show how far a chain would have got.
    """

    path_BS: Tensor  # packed index, 0 after the end
    count_B: Tensor  # accepted nodes, the root included: the number of tokens that the step emits
    packed_BX: (
        Tensor  # [B, S + 4]: tokens, -1 after the end; nodes drafted; first choices; accepted first choices
    )
    place_BS: Tensor  # where the entries belong
    source_place_BS: Tensor  # where verify wrote them
    next_token_BS: Tensor  # the emitted tokens, 0 after the end
    next_place_BS: Tensor  # where the draft's entries of them belong, one position further
    next_position_BS: Tensor

    @property
    def token_BS(self) -> Tensor:
        return self.packed_BX[:, :-3]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The state's table of predicted texts. Rows with ``length`` 0 have none, and nothing is read or written there.

    ``next_R``: index of the next expected token; for a text that left its prediction at index i, -1 - i. ``trust_R``:
    log-probability that the next predicted token is right, 0 from ``CERTAIN`` on. It is computed from ``counts_R2``:
    how many predicted tokens were right recently, and how many were tested.
    """

    tokens_RP: Tensor  # int32
    length_R: Tensor  # int64
    next_R: Tensor  # int64
    counts_R2: Tensor  # float32
    trust_R: Tensor  # float32

    @classmethod
    def empty(cls, rows: int, size: int, device: torch.device) -> Prediction:
        length, place = torch.zeros(2, rows, dtype=torch.int64, device=device).unbind()
        tokens = torch.zeros(rows, size, dtype=torch.int32, device=device)
        counts, trust = torch.zeros(rows, 2, device=device), torch.zeros(rows, device=device)
        return cls(tokens, length, place, counts, trust)


@dataclass(frozen=True, slots=True)
class Continuations:
    """The state's table of continuations that the host proposes: ``length`` tokens (0: none) that follow position
    ``base``, because the last ``matched`` tokens up to there occur elsewhere."""

    tokens_RP: Tensor  # int32
    length_R: Tensor  # int64
    base_R: Tensor  # int64
    matched_R: Tensor  # int64

    @classmethod
    def empty(cls, rows: int, size: int, device: torch.device) -> Continuations:
        length, base, matched = torch.zeros(3, rows, dtype=torch.int64, device=device).unbind()
        return cls(torch.zeros(rows, size, dtype=torch.int32, device=device), length, base, matched)

    @property
    def size(self) -> int:
        """Most tokens of one continuation."""
        return self.tokens_RP.shape[1]

    def write(self, rows_N: Tensor, given_N3: Tensor, token_NP: Tensor) -> None:
        """Replace lengths, bases, matches and tokens of some rows."""
        self.tokens_RP.index_copy_(0, rows_N, token_NP.int())
        for column_R, given_N in zip((self.length_R, self.base_R, self.matched_R), given_N3.T, strict=True):
            column_R.index_copy_(0, rows_N, given_N)


@dataclass(frozen=True, slots=True)
class Sources:
    """The trust in each of N sources of candidates. ``weight_RN``, float32, multiplies a source's log-probabilities: 1
    for a source that is right as often as it says, 0 for a row that has had no request. The last row is padding's."""

    weight_RN: Tensor

    @classmethod
    def empty(cls, rows: int, count: int, device: torch.device) -> Sources:
        weight_RN = torch.zeros(rows, count, device=device)
        weight_RN[-1] = 1
        return cls(weight_RN)

    def begin(self, rows_X: Tensor) -> None:
        """Give these rows to new requests, starting from the geometric mean of all requests' latest weights."""
        weight_RN = self.weight_RN[:-1]
        known_RN = weight_RN > 0
        log_1N = weight_RN.clamp(min=1e-9).log().where(known_RN, 0).sum(0, keepdim=True)
        mean_1N = (log_1N / known_RN.sum(0, keepdim=True).clamp(min=1)).exp()
        self.weight_RN.index_copy_(0, rows_X, mean_1N.expand(len(rows_X), -1))


def tree_pool_size(levels: int, branching: int) -> int:
    """Return the entries of a pool grown level by level: also the index of the first entry at depth ``levels + 1``."""
    return branching + (levels - 1) * branching * branching if levels else 0


def _table_levels(levels: int) -> int:
    """Return the levels of a cached table whose first entries are those of ``levels``. A table must be made before a
    graph that reads it is captured, so a few serve all depths."""
    return max(8, 1 << (levels - 1).bit_length())


@cache
def _branches(levels: int, branching: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return parents and depths of the chains' entries, level by level. Cached, like ``_tree_depths``."""
    index = torch.arange(levels * branching)
    return (index - branching).clamp(min=-1).to(device), (index // branching + 1).to(device)


@cache
def _tree_depths(levels: int, branching: int, device: torch.device) -> Tensor:
    """Return the depth of each entry of a tree pool ``[P]``. Cached, so that it is built outside any graph."""
    widths = torch.tensor([branching] + [branching * branching] * (levels - 1))
    return torch.repeat_interleave(torch.arange(1, levels + 1), widths).to(device)
