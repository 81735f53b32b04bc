"""Synthetic acceptance, for benchmarks of drafts that are not at hand: drafts and verification run as usual, and only
whether a draft is accepted is drawn. The text is then the draft's, not the model's.

Shapes: S draft levels, T packed nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from specserve_kernels import Tree, first_children
from torch import Tensor

from specserve.models.random_tensors import GOLDEN, MIX, signed
from specserve.speculation.state import SamplingState

_NOBODY = -1  # a token that no node carries


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """``rate_S``: the probability that a level's first choice is accepted after the level above was. Deeper levels have
    the last one's."""

    rate_S: Tensor

    @classmethod
    def of(cls, rates: Sequence[float], device: torch.device) -> SyntheticAcceptance:
        return cls(torch.tensor(rates, dtype=torch.float64, device=device))

    def draw(self, tree: Tree, chosen_T: Tensor, sampling: SamplingState) -> tuple[Tree, Tensor]:
        """Return the tree, and the tokens after its nodes, that ``accept_path`` walks down as far as was drawn. A
        request's draws depend on its seed and the position alone. An accepted draft's token is emitted; a rejected
        one's place takes the target's choice, which may be the same token."""
        index_T, first_T = torch.arange(len(chosen_T), device=chosen_T.device), first_children(tree)
        level_T = tree.depth_T.clamp(max=len(self.rate_S) - 1)
        uniform_T = _uniform(sampling.seed[tree.rows_T], sampling.choice[tree.rows_T], tree.position_T)
        accepts_T = (first_T > index_T) & (first_T < len(index_T)) & (uniform_T < self.rate_S[level_T])
        forced_T = tree.token_T[first_T.clamp(max=len(index_T) - 1)]
        walked_T = tree.token_T.where(accepts_T[tree.parent_T] | (tree.local_T == 0), _NOBODY)
        return replace(tree, token_T=walked_T), forced_T.where(accepts_T, chosen_T)


def _uniform(seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """Return numbers from 0 to 1: SplitMix64 (Steele et al. 2014) of the three, whose products wrap."""
    step = signed(GOLDEN)
    mixed = ((seed * step + choice) * step + position) * step
    for shift, factor in MIX:
        mixed = (mixed ^ (mixed >> shift & 2 ** (64 - shift) - 1)) * signed(factor)
    return ((mixed ^ (mixed >> 31 & 2**33 - 1)) & (2**53 - 1)).double() / 2**53
