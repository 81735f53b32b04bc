"""Short launches of prompts in a few fixed sizes, to be captured: what the tail of a cached prompt needs, and short
questions.

Queued one by one, a launch's hundreds of kernels take the host several times as long as so few tokens take the device;
captured, they are one call. A launch that is smaller than its size is padded with runs of the dummy row.

Shapes: B runs, padding included, T tokens of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specserve.spec.context import Context, View
from specserve.spec.prefill import PrefillResult, PromptChunks, prefill
from specserve.spec.state import Needs


@dataclass(frozen=True, slots=True)
class Run:
    """A request's part in a launch: its row, its tokens, and whether one is chosen after them."""

    row: int
    tokens: Sequence[int]
    final: bool


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Holds ``runs`` and one of padding, of ``tokens`` together, which are no more than a tree may have nodes."""

    runs: int
    tokens: int

    @property
    def numbers(self) -> int:
        """How many a launch is told."""
        return 3 * (self.runs + 1) + 1 + 2 * self.tokens

    def holds(self, counts: Sequence[int]) -> bool:
        """Whether runs of so many tokens fit, each run of padding having a token at least."""
        return len(counts) <= self.runs and sum(counts) + self.runs + 1 - len(counts) <= self.tokens

    def pack(self, runs: Sequence[Run], dummy: int) -> list[int]:
        """Rows ``[B]``, which are final ``[B]``, starts ``[B + 1]``, the tokens' runs ``[T]`` and ids ``[T]``."""
        missing = self.runs + 1 - len(runs)
        counts = [len(run.tokens) for run in runs] + [1] * (missing - 1)
        counts.append(self.tokens - sum(counts))
        rows = [run.row for run in runs] + [dummy] * missing
        final = [int(run.final) for run in runs] + [0] * missing
        starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
        owners = [index for index, count in enumerate(counts) for _ in range(count)]
        tokens = [token for run in runs for token in run.tokens]
        return [*rows, *final, *starts, *owners, *tokens, *[0] * (self.tokens - len(tokens))]

    def unpack(self, numbers: Tensor) -> tuple[Tensor, PromptChunks]:
        """The rows, and the launch, as views of what ``pack`` gave."""
        runs, tokens = self.runs + 1, self.tokens
        rows_B, final_B, q_start, slot_T, token_T = numbers.split([runs, runs, runs + 1, tokens, tokens])
        return rows_B, PromptChunks(token_T, slot_T, q_start, final_B.bool(), spans=None)


PROMPT_SIZES = (PromptSize(1, 16), PromptSize(1, 64), PromptSize(4, 64), PromptSize(16, 64))
"""The cheapest first."""


def size_for(counts: Sequence[int], sizes: Sequence[PromptSize]) -> PromptSize | None:
    """The first that holds runs of so many tokens."""
    return next((size for size in sizes if size.holds(counts)), None)


def short_prefill(context: Context, size: PromptSize, numbers: Tensor) -> PrefillResult:
    """Runs a launch of ``size``, which ``numbers`` describes, whatever the lengths of its requests. The dummy row
    stays as it was."""
    rows_B, chunks = size.unpack(numbers)
    slots = context.state.slots
    capacity = slots.pages.shape[1] * context.pool.page_size
    result = prefill(context, View.of(context, rows_B, capacity, Needs()), chunks)
    slots.length[context.state.dummy].fill_(1)
    return result
