"""REST's datastores: token sequences with a suffix array for finding the longest match of a text's end.

He et al. 2023, arXiv 2311.08252. A file is a sequence of chunks: size of the tokens in bytes (uint32), tokens, size of
the suffix array in bytes (uint32), suffix array (int32: the start of every suffix, in order). Tokens are uint16 in the
published files and int32 in the authors' reader for larger vocabularies; the two sizes tell which. All numbers are
little-endian. Files are memory-mapped, so the operating system decides what stays in memory.
"""

from __future__ import annotations

import mmap
import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path

from specserve.speculation.earlier_answers import most_common

LEAST_MATCHED, MOST_MATCHED = 2, 16  # shortest and longest match, in tokens
MOST_PLACES = 16  # matches that vote on the continuation
MOST_KEPT = 2**14  # suffixes of a chunk whose first tokens are kept in memory (3 MiB)


class Chunk:
    """``tokens`` and the sorted start positions of their suffixes. The first tokens of up to ``MOST_KEPT`` evenly
    spaced suffixes stay in memory, where each binary search begins."""

    def __init__(self, tokens: memoryview, suffixes: memoryview) -> None:
        self.tokens = tokens
        self.suffixes = suffixes
        self._step = -(-len(suffixes) // MOST_KEPT)
        places = suffixes[:: self._step].tolist()
        if not 0 <= min(places) <= max(places) < len(tokens):
            raise ValueError(f"its suffix array has places outside of a chunk's {len(tokens)} tokens")
        self.kept = [self._begin(place) for place in places]

    def first(self, tokens: list[int]) -> int | None:
        """Return the index of the first suffix that begins with these tokens, or None."""
        low, high = self._range(bisect_left(self.kept, tokens))
        found = bisect_left(self.suffixes, tokens, low, high, key=self._begin)
        there = found < len(self.suffixes) and self._begin(self.suffixes[found])[: len(tokens)] == tokens
        return found if there else None

    def last(self, tokens: list[int]) -> int:
        """Return the index of the last suffix that begins with these tokens; at least one must."""
        size = len(tokens)
        low, high = self._range(bisect_right(self.kept, tokens, key=lambda begin: begin[:size]))
        return bisect_right(self.suffixes, tokens, low, high, key=lambda at: self._begin(at)[:size]) - 1

    def check(self, vocab_size: int) -> None:
        """Raise ValueError if the suffix array is not sorted or token ids are outside the vocabulary. Only the kept
        suffixes are checked: all of a large file would take minutes."""
        if self.kept != sorted(self.kept):
            raise ValueError("its suffix array is not in order")
        most, least = max(map(max, self.kept)), min(map(min, self.kept))
        if least < 0 or most >= vocab_size:
            raise ValueError(f"it has token ids from {least} to {most}, the model has {vocab_size}")

    def _range(self, kept: int) -> tuple[int, int]:
        """Return the range of the suffix array in which to search, given the position among the kept suffixes."""
        return max(kept - 1, 0) * self._step, min(kept * self._step, len(self.suffixes))

    def _begin(self, place: int) -> list[int]:
        found: list[int] = self.tokens[place : place + MOST_MATCHED].tolist()
        return found


class Datastore:
    """Looks up in a file how a text may continue. All tenants share it."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        """Map a file. Raises ValueError for one that is no datastore or is not of this vocabulary."""
        self._vocab_size = vocab_size
        try:
            self.chunks = _chunks(path)
            for chunk in self.chunks:
                chunk.check(vocab_size)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--speculative-datastore: {path}: {error}; expected a datastore of REST for this model's tokenizer: "
                "python -m specserve.datastore writes one"
            ) from None
        self.size = sum(len(chunk.tokens) for chunk in self.chunks)
        self.token_bytes = self.chunks[0].tokens.itemsize

    def find(self, tenant: str, text: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return up to ``most`` tokens that followed the longest match of the text's end, and the match's length;
        nothing and 0 if no match has ``LEAST_MATCHED`` tokens. Matches in several places, sampled evenly, vote on each
        token."""
        end, longest, found = list(text[-MOST_MATCHED:]), LEAST_MATCHED, list[tuple[Chunk, int]]()
        for chunk in self.chunks:
            matched, first = _longest(chunk, end, longest)
            if matched:
                found = [*(found if matched == longest else ()), (chunk, first)]
                longest = matched
        if not found:
            return [], 0
        share, left = max(MOST_PLACES // len(found), 1), list[list[int]]()
        for chunk, first in found:
            last = chunk.last(end[-longest:])
            starts = [at + longest for at in chunk.suffixes[first : last + 1 : (last - first) // share + 1]]
            left += [chunk.tokens[at : at + most].tolist() for at in starts if at < len(chunk.tokens)]
        tokens = most_common(left) if left else []
        strange = next((i for i, token in enumerate(tokens) if not 0 <= token < self._vocab_size), None)
        return tokens[:strange], longest


def _longest(chunk: Chunk, end: list[int], least: int) -> tuple[int, int]:
    """Return how many of the last tokens occur in a chunk, 0 if fewer than ``least``, and the first place. Bisects the
    length: where n tokens occur, any fewer do too."""
    low, high, matched, found = least, len(end), 0, 0
    while low <= high:
        length = (low + high) // 2
        if (first := chunk.first(end[-length:])) is not None:
            low, matched, found = length + 1, length, first
        else:
            high = length - 1
    return matched, found


def write_chunk(tokens: bytes, suffixes: bytes) -> bytes:
    """Return a chunk in the file format."""
    return b"".join(struct.pack("<I", len(part)) + part for part in (tokens, suffixes))


def _chunks(path: Path) -> list[Chunk]:
    assert sys.byteorder == "little"
    with path.open("rb") as file:
        data, at, found = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), 0, list[Chunk]()
    while at < len(data):
        tokens, at = _part(data, at)
        suffixes, at = _part(data, at)
        if not len(tokens) or len(suffixes) % 4 or len(suffixes) not in (len(tokens), 2 * len(tokens)):
            raise ValueError(
                f"a chunk's suffix array of {len(suffixes)} bytes does not fit its {len(tokens)} bytes of tokens"
            )
        found.append(Chunk(tokens.cast("i" if len(tokens) == len(suffixes) else "H"), suffixes.cast("i")))
    return found


def _part(data: memoryview, at: int) -> tuple[memoryview, int]:
    """Return the length-prefixed part at ``at``, and where the next one begins."""
    start = at + 4
    end = start + (int.from_bytes(data[at:start], "little") if start <= len(data) else len(data))
    if end > len(data):
        raise ValueError(f"it ends within a chunk: expected {end} bytes, found {len(data)}")
    return data[start:end], end
