"""Earlier answers: what followed, in those, the tokens that a text ends with.

As in suffix decoding (Oliaro et al. 2024, arXiv 2411.04975) the longest match counts, and at each token what most
places went on with. Places are found by their last three tokens, the latest first, through chains as a compressor keeps
them (RFC 1951, section 4): memory is a fixed number of bytes a token, and what is old gives way to what is new. Answers
of one tenant are of no use to another: a chain is entered by tenant and tokens, and each place says whose it is.

The host does all of this, between launches.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeVar

KEY = 3  # tokens that must match
MOST_MATCHED = 16  # that are compared
MOST_PLACES = 16  # that are looked at
MOST_TENANTS = 4096  # that are told apart at a time
PIECE = 256  # tokens that are remembered at a time
BYTES = 24  # a token: itself, whose it is, and two links
_END = -1  # after each answer: matches nothing

_Tokens = TypeVar("_Tokens", "array[int]", list[int])


class AnswerIndex:
    """Holds the latest ``capacity`` tokens of all answers. ``written`` counts all that were ever added; the token at
    position p of these lies at p modulo the capacity."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._next_owner = 0
        self.clear()

    def clear(self) -> None:
        """Forget all answers."""
        self.written = 0
        self._tokens, self._owners = (array("i", bytes(4 * self.capacity)) for _ in range(2))
        self._before, self._latest = (array("q", [-1]) * self.capacity for _ in range(2))
        self._tenants: dict[str, int] = {}

    def add(self, tenant: str, answer: Sequence[int]) -> None:
        """Remember an answer, its end alone where it is longer than the capacity."""
        for _ in self.adding(tenant, answer):
            pass

    def adding(self, tenant: str, answer: Sequence[int]) -> Iterator[int]:
        """Remember an answer piece by piece, and yield each piece's number of tokens. Finish one answer before the
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
        how many tokens matched; none and 0 without one of at least ``KEY``. Of the text the last ``MOST_MATCHED``
        tokens are of use."""
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
        return (self._ahead(places, most), longest) if places else ([], 0)

    def _matched(self, position: int, end: array[int], matched: int, oldest: int) -> int:
        """How many tokens up to a position are the last ones of ``end``, of which this many are known to be."""
        while matched < len(end) and position - matched >= oldest:
            if self._tokens[(position - matched) % self.capacity] != end[-1 - matched]:
                break
            matched += 1
        return matched

    def _ahead(self, places: list[int], most: int) -> list[int]:
        """What most places go on with, of equally many the latest one's."""
        found = [self._slice(place + 1, min(most, self.written - place - 1)) for place in places]
        return list(most_common(found))

    def _slice(self, start: int, count: int) -> array[int]:
        """So many tokens from a position on, or, negative, before it."""
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
                self._tenants.clear()  # numbers are never given again: what they had said is lost to all
            self._tenants[tenant] = self._next_owner
            self._next_owner += 1
        return self._tenants[tenant]


def most_common(left: list[_Tokens]) -> _Tokens:
    """At each token what most of these sequences go on with, of equally many the first one's."""
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
