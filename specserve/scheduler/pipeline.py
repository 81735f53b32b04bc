"""The launches in flight, and when to make the next one: as late as the device stays busy, because requests that arrive
until then go first."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from specserve.engine.launch import Emitted, Launch
from specserve.scheduler.request import Request
from specserve.speculation.control.adaptive import Batch
from specserve.speculation.shape import StepShape

HOST = 1.5  # times the longest recent launch, as a margin
FORGET = 0.98  # of the longest launch, at each launch
MARGIN, MARGIN_SHARE = 3e-4, 0.02  # seconds more, and share of the step
TICK = 1e-3  # seconds: shorter waits are not worth it


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launch. ``after``: the one that it waited for."""

    launch: Launch
    requests: list[Request]
    shape: StepShape | None = None  # None: a prefill
    batch: Batch | None = None  # what its shape was chosen for
    after: Launch | None = None
    tokens: int = 0  # of prompts

    @property
    def adds(self) -> int:
        """Most tokens that it may add to a request's cache beyond what prefill counted."""
        return self.shape.depth + 1 if self.shape is not None else 0

    @property
    def idle(self) -> float | None:
        """The seconds that the device paused for it after the launch that it waited for; None if they are not known."""
        return None if self.after is None else self.launch.idle_after(self.after)


class Pipeline:
    """Launches that have not been read, in their order. Knows how long steps take, and so when the device will be
    free, and how long the host takes to launch."""

    def __init__(self) -> None:
        self._items: deque[InFlight] = deque()
        self._took: dict[StepShape, float] = {}
        self._host = {False: 0.0, True: 0.0}  # longest recent launch without and with prompts, decaying
        self._begun = 0.0  # when the device began the first

    def __len__(self) -> int:
        return len(self._items)

    @property
    def last(self) -> Launch | None:
        return self._items[-1].launch if self._items else None

    def append(self, item: InFlight, begun: float) -> None:
        """``begun``: the monotonic time when the host began to launch it."""
        now, prompts = time.monotonic(), item.shape is None
        if not self._items:
            self._begun = now
        self._items.append(item)
        self._host[prompts] = max(now - begun, FORGET * self._host[prompts])

    def read(self) -> tuple[InFlight, list[Emitted]]:
        """Wait for the first launch, and take it out."""
        item = self._items.popleft()
        emitted = item.launch.read()
        self._begun = time.monotonic()
        if item.shape is not None:
            self._took[item.shape] = item.launch.seconds
        return item, emitted

    def patience(self, prompts: bool) -> float:
        """Return the seconds for which the next launch, with prompts or without, may wait. 0 unless a single step is in
        flight, of a shape that has run before, whose next one does not depend on its tokens."""
        item = self._items[0] if len(self._items) == 1 else None
        if item is None or item.shape is None or item.batch is None or item.batch.masked:
            return 0.0
        took = self._took.get(item.shape, 0.0)
        margin = HOST * self._host[prompts] + MARGIN + MARGIN_SHARE * took
        left = self._begun + took - margin - time.monotonic()
        return left if left > TICK else 0.0

    def clear(self) -> None:
        self._items.clear()
