"""Texts that are known beforehand: the target chooses what they say, whatever the shape of the steps.

For measuring. In 16 bits near ties are settled otherwise by every number of tokens that a launch has; each makes
another text from there on, and texts differ in how well they are guessed. Shapes that are compared over a few dozen
requests would be told apart by their texts. Drafts stay the draft's own, and what is accepted of them is what agrees
with the text.

Shapes: R rows of the state, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specserve.core import SamplingParams

UNKNOWN = -1
_Key = tuple[tuple[int, ...], int | None]


class KnownTexts:
    """``tokens_RP``: what stands at each position of each running request, int64, ``UNKNOWN`` where the target chooses
    itself; so it does from position ``end`` on, the last column."""

    def __init__(self, rows: int, end: int, device: torch.device) -> None:
        self.tokens_RP = torch.full((rows, end + 1), UNKNOWN, dtype=torch.int64, device=device)
        self._texts: dict[_Key, Tensor] = {}

    def know(self, prompt: Sequence[int], params: SamplingParams, text: Sequence[int]) -> None:
        """What answers the prompt, in requests that begin from now on; the first text stands. Raises ValueError for
        params that sample without a seed: each of their answers is another."""
        if not params.greedy and params.seed is None:
            raise ValueError("seed: a text that is sampled without one can't be known")
        key = _key(prompt, params)
        if key not in self._texts:
            room = max(0, self.tokens_RP.shape[1] - 1 - len(prompt))
            text_T = torch.tensor(list(text)[:room], dtype=torch.int64)
            self._texts[key] = text_T.to(self.tokens_RP.device)

    def admit(self, row: int, prompt: Sequence[int], params: SamplingParams) -> None:
        """A request takes a row."""
        self.tokens_RP[row].fill_(UNKNOWN)
        text_T = self._texts.get(_key(prompt, params))
        if text_T is not None:
            self.tokens_RP[row, len(prompt) : len(prompt) + len(text_T)] = text_T


def _key(prompt: Sequence[int], params: SamplingParams) -> _Key:
    return tuple(prompt), None if params.greedy else params.seed
