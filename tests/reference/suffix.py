"""This server's suffix decoding by exhaustive scan: what followed the longest match of a text's end, in the text itself
and in earlier answers as far as the host knew them."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

KEY, MATCHED, PLACES, LONGEST, DOUBT = 3, 16, 16, 64, 0.5


class Branch(NamedTuple):
    tokens: list[int]
    score: float  # logarithm of the chance that its first token is right
    matched: int


class Continuation(NamedTuple):
    base: int
    tokens: list[int]
    matched: int
    vain: int = 0  # times in a row that none of its tokens was right
    wait: int = 0  # looks to leave out for that


def matched_at(text: Sequence[int], place: int, end: Sequence[int]) -> int:
    """How many tokens up to `place` are those that `end` ends with."""
    count = 0
    while count < min(MATCHED, place + 1, len(end)) and text[place - count] == end[-1 - count]:
        count += 1
    return count


def recall(answers: Sequence[Sequence[int]], text: Sequence[int]) -> tuple[list[int], int]:
    """What most of the best places in the answers, the latest last, go on with, and how many tokens match there."""
    found = [
        (matched_at(answer, place, text), answer, place)
        for answer in reversed(answers)
        for place in range(len(answer) - 1, KEY - 2, -1)
        if list(answer[place + 1 - KEY : place + 1]) == list(text[-KEY:])
    ][:PLACES]
    if not found:
        return [], 0
    longest = max(matched for matched, _, _ in found)
    left = [list(answer[place + 1 :]) for matched, answer, place in found if matched == longest]
    tokens: list[int] = []
    while len(tokens) < LONGEST:
        votes = Counter(each[len(tokens)] if len(each) > len(tokens) else None for each in left)
        best = max(votes, key=lambda token: votes[token])
        if best is None:
            break
        tokens.append(best)
        left = [each for each in left if each[: len(tokens)] == tokens]
    return tokens, longest


def renew(
    continuation: Continuation | None, answers: Sequence[Sequence[int]], text: Sequence[int]
) -> Continuation | None:
    """What the host has said of a text once it knows this much of it."""
    base, vain, wait = len(text) - 1, 0, 0
    if continuation is not None:
        since = list(text[continuation.base + 1 :])
        vain, wait = continuation.vain, continuation.wait
        if continuation.tokens and since == continuation.tokens[: len(since)]:
            vain = 0
            if 2 * len(since) < len(continuation.tokens):
                return continuation._replace(vain=0)
        elif continuation.tokens:
            vain = 0 if since[0] == continuation.tokens[0] else vain + 1
            wait = {0: 0, 1: 0, 2: 1}.get(vain, 3)
        if wait:
            return Continuation(base, [], 0, vain, wait - 1)
    tokens, matched = recall(answers, text)
    return (
        Continuation(base, tokens, matched, vain)
        if tokens
        else continuation and Continuation(base, [], 0, vain)
    )


def own(text: Sequence[int], count: int, size: int) -> list[Branch]:
    """Of the text itself: the longest match, of equal ones the latest, each with another first token."""
    branches: list[Branch] = []
    wrong = 0.0
    while len(branches) < count:
        taken = {branch.tokens[0] for branch in branches}
        places = [place for place in range(len(text) - 1) if text[place + 1] not in taken]
        best = max(places, key=lambda place: (matched_at(text, place, text), place), default=-1)
        if best < 0 or not (matched := matched_at(text, best, text)):
            break
        longer = list(text)
        for step in range(size):
            longer.append(longer[best + 1 + step])
        branches.append(Branch(longer[len(text) :], wrong + math.log(1 - DOUBT / matched), matched))
        wrong += math.log(DOUBT / matched)
    return branches


def branches(text: Sequence[int], continuation: Continuation | None, count: int, size: int) -> list[Branch]:
    """The best of both, the likeliest first; of two that begin alike the likelier, if equally likely the text's own."""
    found = own(text, count, size)
    if (
        continuation is not None
        and list(text[continuation.base + 1 :]) == continuation.tokens[: len(text) - 1 - continuation.base]
    ):
        at = len(text) - 1 - continuation.base
        if ahead := continuation.tokens[at : at + size]:
            matched = continuation.matched + at
            other = Branch(ahead, math.log(1 - DOUBT / matched), matched)
            same = [branch for branch in found if branch.tokens[0] == ahead[0]]
            if all(branch.score < other.score for branch in same):
                found = [other, *(branch for branch in found if branch not in same)]
    return sorted(found, key=lambda branch: -branch.score)[:count]
