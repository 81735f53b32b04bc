"""Prompt launches in a few fixed sizes, up to 16 prompts and 2,048 tokens together, for CUDA graphs.

Queued one by one, the hundreds of kernels of a launch take the host as long as 500 to 2,500 tokens take the device,
most with quantized weights; captured, they are one call. A launch smaller than its size is padded with runs of the
dummy row, as few as possible, because each takes attention tiles; the other runs are empty.

Shapes: B runs, padding included, T tokens of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from specserve_kernels import MAX_NODES
from torch import Tensor

from specserve.engine.commands import Row
from specserve.speculation.context import Context, View
from specserve.speculation.prefill import PrefillResult, PromptChunks, prefill
from specserve.speculation.state import Needs


@dataclass(frozen=True, slots=True)
class PromptSize:
    """A captured size: at most ``runs`` prompts and ``tokens`` tokens in total, none longer than ``longest``. Those
    of up to MAX_NODES tokens are attended by the verify kernel."""

    runs: int
    tokens: int
    longest: int = MAX_NODES

    @property
    def all_runs(self) -> int:
        """Runs including the padding needed to fill ``tokens``."""
        return self.runs - (-self.tokens // self.longest)

    def holds(self, counts: Sequence[int]) -> bool:
        """Return whether runs of this many tokens fit."""
        return len(counts) <= self.runs and sum(counts) <= self.tokens and max(counts) <= self.longest

    def pack(self, rows: Sequence[Row], dummy: int) -> list[int]:
        """Return slots ``[B]``, final flags ``[B]``, starts ``[B + 1]``, each token's run ``[T]`` and ids ``[T]``, in
        one list."""
        missing = self.all_runs - len(rows)
        tokens = [token for row in rows for token in row.tokens]
        left = self.tokens - len(tokens)
        counts = [len(row.tokens) for row in rows]
        counts += [max(0, min(self.longest, left - index * self.longest)) for index in range(missing)]
        slots = [row.slot for row in rows] + [dummy] * missing
        final = [int(row.final) for row in rows] + [0] * missing
        starts = list(accumulate(counts, initial=0))
        owners = [index for index, count in enumerate(counts) for _ in range(count)]
        return [*slots, *final, *starts, *owners, *tokens, *[0] * left]

    def unpack(self, numbers: Tensor) -> tuple[Tensor, PromptChunks]:
        """Return the rows and the launch, as views of what ``pack`` returned."""
        runs, tokens = self.all_runs, self.tokens
        rows_B, final_B, q_start, slot_T, token_T = numbers.split([runs, runs, runs + 1, tokens, tokens])
        return rows_B, PromptChunks(token_T, slot_T, q_start, final_B.bool(), self.longest, spans=None)


PROMPT_SIZES = (
    PromptSize(1, 16),
    PromptSize(1, 64),
    PromptSize(4, 64),
    PromptSize(8, 128),
    PromptSize(8, 128, longest=128),
    PromptSize(16, 256),
    *(
        PromptSize(16, tokens, longest=tokens)
        for tokens in (256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
    ),
)
"""Cheapest first. A cached prompt leaves at most a page to compute, 16 tokens by default."""


def sizes_within(context_length: int, chunk: int) -> list[PromptSize]:
    """Return the sizes that launches of up to ``chunk`` tokens need and whose padding fits a context: its runs begin at
    position 1 and are followed by one entry."""
    most = min((size.tokens for size in PROMPT_SIZES if size.tokens >= chunk), default=chunk)
    sizes = [size for size in PROMPT_SIZES if size.tokens <= most]
    return [size for size in sizes if min(size.tokens, size.longest) + 2 <= context_length]


def size_for(counts: Sequence[int], sizes: Sequence[PromptSize]) -> PromptSize | None:
    """Return the first size that holds runs of this many tokens, or None."""
    return next((size for size in sizes if size.holds(counts)), None)


def short_prefill(
    context: Context, size: PromptSize, numbers: Tensor, words_BW: Tensor | None = None
) -> PrefillResult:
    """Run a launch of ``size`` with the inputs ``numbers``, whatever the requests' lengths, and masks of all runs'
    first tokens, as in ``hold``. The dummy row's length stays 1; the rest of the row is never read."""
    rows_B, chunks = size.unpack(numbers)
    chunks = replace(chunks, words_BW=words_BW)
    slots = context.state.slots
    capacity = slots.pages.shape[2] * context.pool.page_size
    result = prefill(context, View.of(context, rows_B, capacity, Needs()), chunks)
    slots.length[context.state.dummy].fill_(1)
    return result
