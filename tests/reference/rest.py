"""REST's datastore, written, and read by scanning every position without search or suffix array."""

import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

LEAST, MATCHED, PLACES = 2, 16, 16


def write(path: Path, chunks: Sequence[Sequence[int]], width: str) -> None:
    """``width``: the letter of ``struct``, H for 16 bits and i for 32."""
    parts = []
    for tokens in chunks:
        order = sorted(range(len(tokens)), key=lambda place: list(tokens[place:]))
        for letter, numbers in ((width, tokens), ("i", order)):
            packed = struct.pack(f"<{len(numbers)}{letter}", *numbers)
            parts += [struct.pack("<I", len(packed)), packed]
    path.write_bytes(b"".join(parts))


def look_up(chunks: Sequence[Sequence[int]], text: Sequence[int], most: int) -> tuple[list[int], int]:
    """What followed the longest match of the text's end: at each token what most of some places go on with, which are
    spread evenly over all in the order of what follows."""
    for length in range(min(MATCHED, len(text)), LEAST - 1, -1):
        end = list(text[-length:])
        found = []
        for tokens in chunks:
            starts = [i for i in range(len(tokens)) if list(tokens[i : i + length]) == end]
            if starts:
                found.append((tokens, sorted(starts, key=lambda i: list(tokens[i:]))))
        left = []
        for tokens, starts in found:
            step = (len(starts) - 1) // max(PLACES // len(found), 1) + 1
            ends = [i + length for i in starts[::step]]
            left += [list(tokens[i : i + most]) for i in ends if i < len(tokens)]
        if found:
            return vote(left, most) if left else [], length
    return [], 0


def vote(left: list[list[int]], most: int) -> list[int]:
    said: list[int] = []
    while len(said) < most and left:
        votes = Counter(each[len(said)] if len(each) > len(said) else None for each in left)
        best = max(votes, key=lambda token: votes[token])
        if best is None:
            break
        said.append(best)
        left = [each for each in left if each[: len(said)] == said]
    return said
