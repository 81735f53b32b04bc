"""Where prompts are cut, so that a snapshot of their state can be kept: a launch leaves the state after its last token.
Where prompts and requests end, it serves at the end of the last page, mostly without a cut.

Points are ends of pages: where a text leaves a cached one, the last of messages and of prompts, and every 1,024 tokens.
A cut costs a launch, so that of messages and prompts none is a point which would save less than that. Fewer prompts
come again than chats go on: an end that needs a cut and ends no message is a point only after 1,024 tokens.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress, count, islice

INTERVAL = 1024
# The cost of one more launch, in prompt tokens: about as many as a GPU computes while it reads the weights once.
LAUNCH_COST = 256
MOST_CUTS = 64  # of a chunk in one iteration


@dataclass(frozen=True, slots=True)
class Snapshots:
    """``room``: how many there may be. ``ends``: tokens that end a message. ``block``: as in ``lag``."""

    room: int
    ends: Collection[int]
    block: int

    def serves(self, tokens: int, first: int) -> bool:
        """Return whether a state after ``tokens`` is one of the ``first`` of them, to the end of the last page."""
        return max(tokens // self.block, 1) == max(first // self.block, 1)

    def points(
        self, tokens: Sequence[int], cached: int, known: int, page_size: int, forked: bool = False
    ) -> dict[int, bool]:
        """Return the points of a prompt of which ``cached`` tokens can be used and ``known`` are cached, in order, and
        whether each is only passed. Others are the last one, ends of the first and the last message, and where the
        prompt left a text. The first and the last message go first. ``forked``: the prompt's end is always one. Those
        at intervals, and then those of other messages, are further apart where a long prompt would take more than half
        of the room."""
        most = (len(tokens) - 1) // page_size * page_size  # the last token is always computed
        is_end = self.ends.__contains__
        after = compress(count(cached + 1), map(is_end, tokens[cached:]))
        ends = sorted({min(end // page_size * page_size, most) for end in after})
        first = ends[:1] if ends and not any(map(is_end, islice(tokens, cached))) else []
        found = [0, cached, *([known] if known > cached + page_size else [])]
        step = max(INTERVAL // page_size, 1) * page_size
        step *= max(1, -(-2 * (most // step) // self.room))
        apart = most // max(1, self.room // 2 - most // step)
        for end in (*first, *ends[-1:], *ends[len(first) : -1]):
            if _far(end, found, 0 if end in (*first, ends[-1]) else apart):
                insort(found, end)
        found = sorted({*found, *range(step, most + 1, step)})
        uncut = len(tokens) % page_size > 0 and self.serves(len(tokens), most)
        if forked or _far(most, found, 0 if uncut else INTERVAL):
            found.append(most)
        found = [point for point in sorted({*found}) if point > cached]
        if found[-1:] == [most] and uncut:
            found[-1] = len(tokens)
        return {point: point not in {*first, *ends[-1:], known, *found[-1:]} for point in found}


def _far(end: int, points: Sequence[int], least: int = 0) -> bool:
    """Return whether the points next to a place are ``least`` tokens from it, and so far that the tokens between cost
    more than a launch."""
    at, least = bisect(points, end), max(least, LAUNCH_COST)
    return all(abs(end - point) >= least for point in points[max(at - 1, 0) : at + 1])
