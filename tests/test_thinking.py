"""Thinking budgets: whether an answer is in its reasoning, however its text is tokenized."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from specserve.constraints.thinking import ThoughtState, after_nodes
from specserve.core import Thought

PIECES = ["<think>", "</think>", "<", "think", ">", "</", "</think", "k>\n", "\n", " hm", "a", "", "é"]
END = [8, 1]


def begun(budget: int, opened: bool = True) -> ThoughtState:
    thought = Thought(open="<think>", close="</think>", end=END, begun=opened)
    return ThoughtState.begin(thought, budget, lambda token: PIECES[token].encode())


def after(state: ThoughtState, tokens: Iterable[int]) -> ThoughtState:
    for token in tokens:
        state = state.after(token)
    return state


@pytest.mark.parametrize("opened", [False, True])
def test_stages_follow_from_the_text(opened: bool) -> None:
    rng, seen = random.Random(0), set()
    for _ in range(4000):
        tokens = [rng.choice([*range(len(PIECES)), 0, 1, 2]) for _ in range(rng.randint(0, 8))]
        text = "".join(PIECES[token] for token in tokens)
        written = text if opened else text.lstrip()
        if not opened and not written.startswith("<think>"):
            expected = "before" if "<think>".startswith(written) else "over"
        else:
            expected = (
                "over" if "</think>" in written.removeprefix("" if opened else "<think>") else "thinking"
            )
        assert after(begun(99, opened), tokens).stage == expected, text
        seen.add(expected)
    assert len(seen) == (2 if opened else 3)


@pytest.mark.parametrize("budget", range(5))
def test_a_budget_ends_a_thought(budget: int) -> None:
    state = begun(budget)
    for _ in range(budget):
        assert (state.stage, state.forced_token) == ("thinking", None)
        state = state.after(9)
    for due in END:
        assert (state.stage, state.forced_token) == ("closing", due)
        state = state.after(due)
    assert (state.stage, state.forced_token, state.after(0).stage) == ("over", None, "over")


def test_marks_are_no_part_of_the_budget_and_what_ends_in_time_is_left() -> None:
    assert after(begun(2, False), [8, 0]).left == 2
    assert after(begun(2, False), [8, 2, 3, 4]).left == 2
    assert after(begun(2), [9, 1]).stage == "over"
    assert after(begun(2), [9, 9]).forced_token == END[0]
    assert after(begun(0, False), [0]).forced_token == END[0]


def test_nodes_of_a_tree_have_the_states_of_their_paths() -> None:
    rng = random.Random(1)
    for _ in range(300):
        state = after(begun(rng.randint(0, 4)), rng.choices([9, 10, 5], k=rng.randint(0, 2)))
        parents, paths = [0], [[]]
        tokens = [0]
        for node in range(1, 12):
            parent = rng.randrange(node)
            token = after(state, paths[parent]).forced_token
            tokens.append(rng.choice([9, 1, 6]) if token is None else token)
            parents.append(parent)
            paths.append([*paths[parent], tokens[-1]])
        assert after_nodes(state, tokens, parents) == [after(state, path) for path in paths]


def test_a_budget_may_end_within_a_character() -> None:
    """However the bytes come, and until the first closing token."""
    rng = random.Random(2)
    for _ in range(500):
        text = "".join(rng.choices("aé€😀", k=rng.randint(1, 6))).encode()
        cuts = sorted(rng.sample(range(1, len(text)), rng.randint(0, min(4, len(text) - 1))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        budget = rng.randint(1, len(pieces))
        thought = Thought(open="<think>", close="</think>", end=END, begun=True)
        state, written = ThoughtState.begin(thought, budget, pieces.__getitem__), b""
        for token in range(budget):
            assert not state.cut
            state, written = state.after(token), written + pieces[token]
            assert state.half == (written.decode(errors="ignore").encode() != written)
        assert state.cut == state.half
        assert not state.after(END[0]).half
