"""What drafting and verifying pass to each other: levels, pools, trees, accepted paths, predictions.

All are of a whole batch.

Shapes: B slots in the batch, W nodes a slot that one draft forward runs (1 for the root's level, then K), N = B * W,
K branching, A tokens on the path after the root, P pool entries a slot, T packed nodes of the whole batch (roots
included), S draft levels, R state rows, S1 = S + 1. In ``Prediction``: P tokens that a prediction may have, N tokens of
a request that are remembered.

Nodes of a slot stand together, its root first, parents before children. A node's *local* index counts within its slot.
Nodes left over when the pools offer fewer than T - B live candidates have slot B and local index 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_NODES = 64  # ancestors of a node are the bits of one int64
RECENT = 4  # tokens by which a text that departed from its prediction is found again: the longest match wins


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes one draft forward runs, row-major by slot."""

    token_N: Tensor  # int64
    source_N: Tensor  # int64, row of the features that each is drafted from
    rows_N: Tensor  # int64, state row
    position_N: Tensor  # int64
    page_N: Tensor  # int64, where their cache entries go
    offset_N: Tensor
    score_BW: Tensor  # cumulative log-probability
    pool_BW: Tensor  # int64, own pool index, -1 for the root
    scratch_BWA: (
        Tensor  # int64, positions of the entries beyond the prefix that each sees: ancestors', its own last
    )
    path_NA: Tensor  # int64, tokens after the root on the path to each, itself included

    @property
    def width(self) -> int:
        return self.score_BW.shape[1]


@dataclass(frozen=True, slots=True)
class Pool:
    """Drafted candidates in breadth-first order. ``parents``: pool index of the parent, -1 for the root. A draft
    writes it level by level."""

    tokens_BP: Tensor  # int64
    parents_BP: Tensor  # int64
    scores_BP: Tensor  # cumulative log-probability

    @classmethod
    def empty(cls, slots: int, size: int, dtype: torch.dtype, device: torch.device) -> Pool:
        tokens, parents = (torch.empty(slots, size, dtype=torch.int64, device=device) for _ in range(2))
        return cls(tokens, parents, torch.empty(slots, size, dtype=dtype, device=device))


@dataclass(frozen=True, slots=True)
class Tree:
    """The nodes to verify, packed by slot, roots first; what is left over has slot B. ``parent_T`` is a packed index,
    a root's its own; ``depth_T`` and ``mask_T`` (bit j: local node j is an ancestor or the node itself; bit 63 is the
    sign) are derived from it. ``page_T`` and ``offset_T`` are where the entry goes: page 0 for what is left over."""

    token_T: Tensor
    parent_T: Tensor
    slot_T: Tensor
    rows_T: Tensor  # state row; of what is left over, some valid one
    local_T: Tensor
    depth_T: Tensor
    mask_T: Tensor
    position_T: Tensor
    page_T: Tensor
    offset_T: Tensor
    path_TA: Tensor  # tokens on the path to each node, the root's not, V for holes; of S columns
    q_start: Tensor  # [B + 1]
    is_chain: bool  # every accepted node already lies at its final slot


@dataclass(frozen=True, slots=True)
class Accepted:
    """The way down each tree, and where its entries lie. ``[B, S + 1]`` each, by depth; page 0 beyond the end.

    *First choices* are nodes of which each, and each above it, is the best child of its parent: what a chain would have
    drafted, as far as the tree holds it. Those accepted are how far one would have got."""

    path_BS: Tensor  # packed index, 0 beyond the end
    count_B: Tensor  # accepted nodes, the root included: how many tokens the step emits
    packed_BX: Tensor  # [B, S + 4]: tokens, -1 beyond the end; nodes drafted; first choices; those accepted
    page_BS: Tensor  # where the entries belong
    offset_BS: Tensor
    source_page_BS: Tensor  # where verify wrote them
    source_offset_BS: Tensor
    next_token_BS: Tensor  # the emitted tokens, 0 beyond the end
    next_page_BS: Tensor  # where the draft's entries of them belong, one position further
    next_offset_BS: Tensor
    next_position_BS: Tensor

    @property
    def token_BS(self) -> Tensor:
        return self.packed_BX[:, :-3]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The state's table of predicted texts. Every row of ``length`` 0 has none, and nothing is read or written there.

    ``next_R``: index of the token that the prediction expects next; of a text that departed from it, -1 less the index
    up to which it was followed. ``recent_RN``: the text's latest tokens, -1 for those that there are not yet.
    ``trust_R``: logarithm of the chance that the next predicted token is right, 0 from ``CERTAIN`` on; from
    ``counts_R2``: how many were of late, of how many that were looked at.
    """

    tokens_RP: Tensor  # int32
    length_R: Tensor  # int64
    next_R: Tensor  # int64
    recent_RN: Tensor  # int64
    counts_R2: Tensor  # float32
    trust_R: Tensor  # float32

    @classmethod
    def empty(cls, rows: int, size: int, device: torch.device) -> Prediction:
        length, place = torch.zeros(2, rows, dtype=torch.int64, device=device).unbind()
        recent = torch.full((rows, RECENT), -1, dtype=torch.int64, device=device)
        tokens = torch.zeros(rows, size, dtype=torch.int32, device=device)
        counts, trust = torch.zeros(rows, 2, device=device), torch.zeros(rows, device=device)
        return cls(tokens, length, place, recent, counts, trust)
