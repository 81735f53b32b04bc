"""Find stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress


class StopFinder:
    """Pass text on until a stop string is complete, and hold back an end that may be the beginning of one.

    The result does not depend on how the text is cut into pieces. The stop string that is complete first counts, and
    among those that end together the longest. It is ``found``. Hidden text is searched, but not passed on.
    """

    def __init__(self, stops: Sequence[str], included: bool = False) -> None:
        """``included``: the stop string is part of the answer, hidden or not."""
        self._stops = stops
        self._included = included
        self._held = ""
        self._shown: list[bool] = []  # of each character held back
        self.found: str | None = None

    def feed(self, text: str, armed: bool = True, hidden: bool = False) -> tuple[str, bool]:
        """Return the text that is certainly before any stop string, with the one found if it is ``included``; and
        whether one was found.

        Stop strings that become complete while not ``armed`` are ordinary text.
        """
        seen, whole = len(self._held), self._held + text
        self._held, self._shown = whole, [*self._shown, *[not hidden] * len(text)]
        if armed and (place := self._find(whole, seen)) is not None:
            self.found = whole[slice(*place)]
            before = self._take(place[0])
            self._held, self._shown = "", []
            return before + (self.found if self._included else ""), True
        return self._take(len(whole) - self._possible_start(whole)), False

    def flush(self) -> str:
        """Return the text held back, after the last piece."""
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        """Return the first characters held back, but not the hidden ones."""
        taken = "".join(compress(self._held[:count], self._shown))
        self._held, self._shown = self._held[count:], self._shown[count:]
        return taken

    def _find(self, text: str, seen: int) -> tuple[int, int] | None:
        """Return the start and end of the first stop string that ends beyond ``seen``."""
        found = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := text.find(stop, max(0, seen - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that is the incomplete beginning of a stop string."""
        return max((overlap(text, stop) for stop in self._stops), default=0)


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is an incomplete beginning of ``stop``."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
