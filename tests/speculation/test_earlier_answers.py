"""The store of earlier answers: correct matches, a bounded size, and no answers shared between tenants."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from benchmarks.host import Device, new_request
from specserve.scheduler.observers import MOST_ADDED, AnswersObserver
from specserve.speculation.earlier_answers import BYTES, MOST_TENANTS, PIECE, AnswerIndex
from tests.reference.suffix import LONGEST, recall


def texts(rng: random.Random, count: int, vocabulary: int) -> list[list[int]]:
    found: list[list[int]] = []
    for _ in range(count):
        text = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 60))]
        if found and rng.random() < 0.6:  # it repeats a part of another
            other = rng.choice(found)
            start = rng.randrange(len(other))
            text[rng.randrange(len(text)) :] = other[start : start + 40]
        found.append(text)
    return found


@pytest.mark.parametrize("vocabulary", [2, 5, 50])
def test_finds_what_a_look_at_every_place_finds(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    answers, index, hits = texts(rng, 80, vocabulary), AnswerIndex(100_000), 0
    for number, answer in enumerate(answers):
        for text in [*texts(rng, 2, vocabulary), answers[rng.randrange(len(answers))][:20]]:
            expected = recall(answers[:number], text)
            assert index.find("", text, LONGEST) == expected
            hits += bool(expected[0])
        index.add("", answer)
    assert hits > 20


@pytest.mark.parametrize("capacity", [1, 2, 3, 50, 333])
def test_only_the_latest_tokens_are_kept(capacity: int) -> None:
    """Whatever is found, it stands so in the latest tokens; and what was just said is found."""
    rng = random.Random(capacity)
    index, said = AnswerIndex(capacity), list[int]()
    for answer in texts(rng, 60, 6):
        for text in texts(rng, 2, 6):
            tokens, matched = index.find("", text, LONGEST)
            if tokens:
                found = [*text[-matched:], *tokens]
                kept = said[-capacity:]
                places = range(len(kept) - matched)
                assert any(kept[i : i + matched + 1] == found[: matched + 1] for i in places)
        index.add("", answer)
        said += [*answer, -1]
        if (
            5 < len(answer) < capacity - 1
            and len({*zip(answer, answer[1:], answer[2:], strict=False)}) == len(answer) - 2
        ):
            assert index.find("", answer[:4], LONGEST)[1] >= 3


def test_tenants_are_told_nothing_of_each_other() -> None:
    rng = random.Random(0)
    index, answers = AnswerIndex(4096), {tenant: texts(rng, 10, 3) for tenant in ("", "a", "b")}
    for tenant, each in answers.items():
        for answer in each:
            index.add(tenant, answer)
    for tenant, each in answers.items():
        for text in texts(rng, 40, 3):
            assert index.find(tenant, text, LONGEST) == recall(each, text)
    assert index.find("c", answers["a"][0][:8], LONGEST) == ([], 0)


def test_tenants_without_end_take_no_memory_and_get_no_other_s() -> None:
    index = AnswerIndex(1024)
    index.add("first", [1, 2, 3, 4, 5])
    for number in range(MOST_TENANTS):
        assert index.find(str(number), [1, 2, 3], LONGEST) == ([], 0)
        index.add(str(number), [1])
    index.add("other", [7])
    assert index.find("first", [1, 2, 3], LONGEST) == ([], 0)
    assert all(index.find(str(n), [1, 2, 3], LONGEST) == ([], 0) for n in range(MOST_TENANTS))


def test_memory_is_what_is_said() -> None:
    tracemalloc.start()
    try:
        index, sizes = AnswerIndex(20_000), list[int]()
        for _ in range(2):
            for number in range(40):
                index.add("", range(number, number + 1000))
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes == [pytest.approx(20_000 * BYTES, rel=0.03)] * 2
    assert index.find("", [60, 61, 62], LONGEST)[1] == 3
    index.clear()
    assert index.find("", [60, 61, 62], LONGEST) == ([], 0)


def test_a_long_answer_holds_no_launch_up() -> None:
    """It is remembered in pieces, one after each launch, as if in one; others wait for their turn."""
    index, whole = AnswerIndex(20_000), AnswerIndex(20_000)
    observer = AnswersObserver(index, Device(4), LONGEST)  # type: ignore[arg-type]
    for number, length in enumerate((5000, 40, 1000)):
        request = new_request(number)
        request.output += [(7 * i + number) % 300 for i in range(length)]
        observer.left(request)
        whole.add("", request.output)
    while index.written < whole.written:
        before = index.written
        observer.collected(stepped=True)
        assert 0 < index.written - before < MOST_ADDED + PIECE
    for text in ([7 * i % 300 for i in range(20)], [1792 % 300, 1799 % 300, 1806 % 300]):
        assert index.find("", text, LONGEST) == whole.find("", text, LONGEST) != ([], 0)
