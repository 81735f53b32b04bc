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
_Key = tuple[tuple[int, ...], int | None, int]  # prompt; seed, None for greedy ones; which of n answers


class KnownTexts:
    """``tokens_RP``: what stands at each position of each running request, int64, ``UNKNOWN`` where the target chooses
    itself; so it does from position ``end`` on, the last column."""

    def __init__(self, rows: int, end: int, device: torch.device) -> None:
        self.tokens_RP = torch.full((rows, end + 1), UNKNOWN, dtype=torch.int64, device=device)
        self._texts: dict[_Key, Tensor] = {}

    def know(
        self, prompt: Sequence[int], params: SamplingParams, text: Sequence[int], choice: int = 0
    ) -> None:
        """What answers the prompt, greedily or with this seed, in requests that begin from now on, whatever else they
        ask for; the first text stands. Raises ValueError for params that sample without a seed: each of their answers
        is another."""
        key = _key(prompt, params, choice)
        if key is None:
            raise ValueError("seed: a text that is sampled without one can't be known")
        room = max(0, self.tokens_RP.shape[1] - 1 - len(prompt))
        self._texts.setdefault(key, torch.tensor(list(text)[:room], dtype=torch.int64))

    def admit(
        self, row: int, prompt: Sequence[int], params: SamplingParams, choice: int, output: Sequence[int]
    ) -> None:
        """A request takes a row, maybe not its first, with the output that it has."""
        self.tokens_RP[row].fill_(UNKNOWN)
        key = _key(prompt, params, choice)
        text_T = None if key is None else self._texts.get(key)
        if text_T is not None and text_T[: len(output)].tolist() == list(output)[: len(text_T)]:
            end = len(prompt) + len(text_T)
            self.tokens_RP[row, len(prompt) : end] = text_T.to(self.tokens_RP.device, non_blocking=True)


def _key(prompt: Sequence[int], params: SamplingParams, choice: int) -> _Key | None:
    if params.greedy:
        return tuple(prompt), None, choice
    return None if params.seed is None else (tuple(prompt), params.seed, choice)
