"""An index of earlier answers: finds what followed the tokens that a text ends with.

As in suffix decoding (Oliaro et al. 2024, arXiv 2411.04975), the longest match wins, and its places vote on each next
token. Places are found by their last three tokens, the latest first, through hash chains like a compressor's (RFC 1951,
section 4): memory is a fixed number of bytes a token, and new tokens overwrite the oldest. Tenants don't see each
other's answers: chains are hashed by tenant and tokens, and each place stores its owner.

All of this runs on the host, between launches.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeVar

KEY = 3  # tokens that must match
MOST_MATCHED = 16  # tokens compared
MOST_PLACES = 16  # places examined in a chain
MOST_TENANTS = 4096  # tenants indexed at the same time
PIECE = 256  # tokens added at a time
BYTES = 24  # memory of a token: its id, its owner and two links
_END = -1  # follows each answer and matches nothing

_Tokens = TypeVar("_Tokens", "array[int]", list[int])


class AnswerIndex:
    """Holds the latest ``capacity`` tokens of all answers in a ring buffer: the token at position p of the ``written``
    tokens ever added is at p modulo ``capacity``."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._next_owner = 0
        self.clear()

    def clear(self) -> None:
        self.written = 0
        self._tokens, self._owners = (array("i", bytes(4 * self.capacity)) for _ in range(2))
        self._before, self._latest = (array("q", [-1]) * self.capacity for _ in range(2))
        self._tenants: dict[str, int] = {}

    def add(self, tenant: str, answer: Sequence[int]) -> None:
        """Add an answer; of one longer than the capacity, only its end."""
        for _ in self.adding(tenant, answer):
            pass

    def adding(self, tenant: str, answer: Sequence[int]) -> Iterator[int]:
        """Add an answer piece by piece, and yield the number of tokens of each piece. Finish one answer before the
        next."""
        owner, capacity = self._owner(tenant), self.capacity
        tokens = (*(answer[-(capacity - 1) :] if capacity > 1 else ()), _END)
        for begin in range(0, len(tokens), PIECE):
            for end in range(begin + 1, min(begin + PIECE, len(tokens)) + 1):
                position = self.written
                place = position % capacity
                self._tokens[place], self._owners[place] = tokens[end - 1], owner
                self._before[place] = -1
                if KEY <= end < len(tokens):
                    key = self._key(owner, tokens[end - KEY : end])
                    self._before[place], self._latest[key] = self._latest[key], position
                self.written += 1
            yield min(PIECE, len(tokens) - begin)

    def find(self, tenant: str, text: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return up to ``most`` tokens that followed the longest match of the text's end in the tenant's answers, and
        the match's length; nothing and 0 if no match has ``KEY`` tokens. Only the last ``MOST_MATCHED`` tokens of the
        text are read."""
        owner, end = self._tenants.get(tenant), array("i", text[-MOST_MATCHED:])
        if owner is None or len(end) < KEY:
            return [], 0
        places: list[int] = []
        longest, oldest = KEY, max(self.written - self.capacity, 0)
        position = self._latest[self._key(owner, end[-KEY:])]
        for _ in range(MOST_PLACES):
            if position - longest + 1 < oldest:
                break
            place = position % self.capacity
            if self._owners[place] == owner and self._slice(position + 1, -longest) == end[-longest:]:
                matched = self._matched(position, end, longest, oldest)
                if matched > longest:
                    longest, places = matched, []
                places.append(position)
            position = self._before[place]
        if not places:
            return [], 0
        found = [self._slice(place + 1, min(most, self.written - place - 1)) for place in places]
        return list(most_common(found)), longest  # ties go to the latest place

    def _matched(self, position: int, end: array[int], matched: int, oldest: int) -> int:
        """Return how many tokens up to a position equal the end of ``end``; the first ``matched`` are known to."""
        while matched < len(end) and position - matched >= oldest:
            if self._tokens[(position - matched) % self.capacity] != end[-1 - matched]:
                break
            matched += 1
        return matched

    def _slice(self, start: int, count: int) -> array[int]:
        """Return ``count`` tokens from a position on, or, if negative, those before it."""
        if count < 0:
            start, count = start + count, -count
        place = start % self.capacity
        found = self._tokens[place : place + count]
        return found if len(found) == count else found + self._tokens[: count - len(found)]

    def _key(self, owner: int, tokens: Sequence[int]) -> int:
        return hash((owner, *tokens)) % self.capacity

    def _owner(self, tenant: str) -> int:
        if tenant not in self._tenants:
            if len(self._tenants) == MOST_TENANTS:
                self._tenants.clear()  # owner numbers are never reused: the old answers never match again
            self._tenants[tenant] = self._next_owner
            self._next_owner += 1
        return self._tenants[tenant]


def most_common(left: list[_Tokens]) -> _Tokens:
    """Return the sequence that most of these sequences agree on, token by token; ties go to the first one."""
    while (least := min(left)) != (greatest := max(left)):
        same = next(
            (i for i, pair in enumerate(zip(least, greatest, strict=False)) if pair[0] != pair[1]),
            len(least),
        )
        votes = Counter(each[same] if same < len(each) else _END for each in left)
        token = votes.most_common(1)[0][0]
        if token == _END or _END in least[:same]:
            least = least[:same]
            break
        left = [each for each in left if same < len(each) and each[same] == token]
    return least if _END not in least else least[: least.index(_END)]
