"""Where prompts are cut, so that a snapshot of their state can be kept: a launch leaves the state after its last token.

Points are ends of pages: the last of a prompt and of messages in it, where its text leaves a cached one, and every
1,024 tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

INTERVAL = 1024
CLOSE = 256  # tokens that take about as long as one more launch


@dataclass(frozen=True, slots=True)
class Snapshots:
    """``room``: how many there may be. ``ends``: tokens that end a message."""

    room: int
    ends: Collection[int]

    def points(self, tokens: Sequence[int], known: int, page_size: int) -> list[int]:
        """Return the points of a prompt, of which ``known`` tokens are cached, in order. A message's end between the
        first and the last, and the prompt's, is none if it is close to one before it. Those in between are further
        apart where a long prompt would take more than half of the room."""
        most = (len(tokens) - 1) // page_size * page_size  # the last token is always computed
        after = (index for index, token in enumerate(tokens, 1) if token in self.ends)
        ends = sorted({min(end // page_size * page_size, most) for end in after})
        found = {0}
        for end in (*ends, most):
            if end in ends[:1] + ends[-1:] or end - max(found) >= CLOSE or len(found) == 1:
                found.add(end)
        if not any(0 <= known - point <= page_size for point in found):
            found.add(known)
        step = max(INTERVAL // page_size, 1) * page_size
        step *= max(1, -(-2 * (most // step) // self.room))
        return sorted((found | {*range(step, most + 1, step)}) - {0})
