"""Find stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Pass text on until a stop string is complete, and hold back an end that may be the beginning of one.

    The result does not depend on how the text is cut into pieces. The stop string that is complete first counts, and
    among those that end together the longest. It is ``found``.
    """

    def __init__(self, stops: Sequence[str], included: bool = False) -> None:
        """``included``: the stop string is part of the answer."""
        self._stops = stops
        self._included = included
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, armed: bool = True) -> tuple[str, bool]:
        """Return the text that is certainly before any stop string, with the one found if it is ``included``; and
        whether one was found.

        Stop strings that become complete while not ``armed`` are ordinary text.
        """
        seen, text = len(self._held), self._held + text
        if armed and (place := self._find(text, seen)) is not None:
            self._held, self.found = "", text[slice(*place)]
            return text[: place[1] if self._included else place[0]], True
        hold = self._possible_start(text)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False

    def flush(self) -> str:
        """Return the text held back, after the last piece."""
        held, self._held = self._held, ""
        return held

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
