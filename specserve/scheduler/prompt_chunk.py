"""The prompt tokens of one prefill launch, and which prompts wait until another has computed their common prefix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from operator import itemgetter

from specserve.engine.commands import Row
from specserve.scheduler.counters import Counters
from specserve.scheduler.memory import Memory
from specserve.scheduler.points import LAUNCH_COST
from specserve.scheduler.request import Request, row_init
from specserve.speculation.state import PageRun, RowInit

MOST_WAITS = 2  # launches that one request waits for


class PromptChunk:
    """A launch of at most ``room`` tokens: ``rows`` of ``requests``, of which ``begun`` are new on the device.

    A launch may compute the same tokens for several prompts as long as these are fewer than another launch would cost;
    a prompt that would exceed this waits. If a launch has room left, all its prompts end with it or at a point, so the
    next launch finds in the cache what others waited for."""

    def __init__(self, memory: Memory, counters: Counters, room: int) -> None:
        self._memory = memory
        self._counters = counters
        self.room = room
        self._most = min(LAUNCH_COST, room)
        self._again = 0  # tokens that the launch computes more than once
        self.rows: list[Row] = []
        self.requests: list[Request] = []
        self.begun: list[RowInit] = []
        self.pages: list[PageRun] = []  # new ones of the others
        self.restored: list[tuple[int, int]] = []  # slots and the snapshots from which they continue

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    def add(self, request: Request, forked: bool) -> None:
        """Add as many of a request's prompt tokens as there is room for, and pages, unless it should wait. ``forked``:
        another has the same prompt."""
        if not request.begun:
            if self._still_waits(request):
                return
            # Reuse what was computed of its prompt since it got its slot.
            found = self._memory.find(request)
            if self._should_wait(request, found.tokens):
                return
            request.prefilled = self._memory.take(request, found)
            if request.state:
                self.restored.append((request.slot, request.state))
            request.points = self._memory.points(request, forked)
        begin = request.prefilled
        cut = next((point for point in request.points if point > begin), len(request.context))
        end, pages = self._memory.extend(request, min(begin + self.room, cut))
        if end <= begin:
            return
        if request.begun:
            self.pages += pages
        else:
            self._begin(request, begin)
        request.prefilled = end
        self.room -= end - begin
        tokens = request.context[begin:end]
        scored = () if request.scores is None else request.prompt[begin + 1 : end + 1]
        self.rows.append(Row(request.slot, request.params, end, tokens, not request.prefilling, scored))
        self.requests.append(request)

    def _begin(self, request: Request, cached: int) -> None:
        """Prepare a request for its first chunk, after ``cached`` tokens."""
        request.begun = True
        if request.scores is not None:
            del request.scores[cached:]  # later ones are computed again
        if request.cached_tokens is None:
            request.cached_tokens = cached
            self._counters.cached_tokens += cached
            self._counters.prompt_tokens += len(request.prompt)
        request.consumed = len(request.output)
        self.begun.append(row_init(request, cached, self._memory.page_size))

    def _still_waits(self, request: Request) -> bool:
        """Return whether the launch only goes on to compute what a request waits for."""
        if request.awaited is None:
            return False
        other, until = request.awaited
        return any(other.slot == row.slot and row.length - len(row.tokens) < until for row in self.rows)

    def _should_wait(self, request: Request, cached: int) -> bool:
        """Return whether the launch already computes so much of a request's prompt, of which ``cached`` tokens are in
        the cache, that waiting for it saves more than another launch costs. A request for prompt log-probabilities
        never waits: it has to compute its tokens itself."""
        if request.scores is not None or request.waits == MOST_WAITS:
            return False
        shares = [(self._memory.shared(request, other), other) for other in self.requests]
        shared, other = max(shares, key=itemgetter(0), default=(0, request))
        saved = max(0, shared - max(cached, request.prefilled))
        if not saved or self._again + saved < self._most:
            self._again += saved
            return False
        request.waits += 1
        request.awaited = other, shared
        return True


def fill_chunk(
    memory: Memory, counters: Counters, room: int, requests: Sequence[Request], most: int
) -> PromptChunk:
    """Return a launch of at most ``room`` tokens of up to ``most`` of the requests that have prompt tokens left."""
    chunk = PromptChunk(memory, counters, room)
    for request, following in zip_longest(requests, requests[1:]):
        if request.prefilling and chunk.room and len(chunk.rows) < most:
            chunk.add(request, forked=following is not None and following.context == request.context)
    return chunk
