"""Predicted texts: the PyTorch version against a slow one in Python, and the kernel against both."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from specserve_kernels.reference.tree import grow as grow_reference
from specserve_kernels.reference.tree import prediction as reference
from specserve_kernels.types import Level, Pool, Prediction, Slots
from torch import Tensor

pytest.importorskip("triton")
from specserve_kernels.ops.tree import grow, prediction

SIZE, VOCAB = 1200, 6


@dataclasses.dataclass
class Follower:
    """One request, in Python."""

    predicted: list[int]
    place: int = 0
    text: list[int] = dataclasses.field(default_factory=list)

    def emit(self, tokens: list[int]) -> int:
        if not self.predicted:
            return 0
        self.text += tokens
        ahead = self.predicted[self.place :] if self.place >= 0 else []
        pairs = enumerate(zip(tokens, ahead, strict=False))
        followed = next((i for i, (one, other) in pairs if one != other), min(len(tokens), len(ahead)))
        if followed == len(tokens):
            self.place += followed
            return followed
        reached = self.place + followed if self.place >= 0 else -1 - self.place
        found = [
            (-matched, index < reached, index)
            for index in range(1, len(self.predicted))
            if (matched := self._matched(index)) >= 2
        ]
        self.place = min(found)[2] if found else -1 - reached
        return followed

    def _matched(self, index: int) -> int:
        count = 0
        while count < min(4, index, len(self.text)) and (
            self.predicted[index - 1 - count] == self.text[-1 - count]
        ):
            count += 1
        return count


def edited(rng: random.Random, text: list[int]) -> list[int]:
    """A text with spans replaced, left out and put in."""
    found: list[int] = []
    at = 0
    while at < len(text):
        keep = rng.randrange(1, 30)
        found += text[at : at + keep]
        at += keep
        found += [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 3]))]
        at += rng.choice([0, 0, 2, 5])
    return found


def table_of(followers: list[Follower], device: str) -> tuple[Prediction, Tensor]:
    """A table with the followers in rows of their own, and those rows."""
    table = Prediction.empty(len(followers) + 2, SIZE, torch.device(device))
    table.tokens_RP.fill_(3)  # what another request left there
    rows_B = torch.randperm(len(followers) + 2)[: len(followers)]
    for row, follower in zip(rows_B.tolist(), followers, strict=True):
        table.length_R[row] = len(follower.predicted)
        predicted = torch.tensor(follower.predicted, dtype=torch.int32)
        table.tokens_RP[row, : len(follower.predicted)] = predicted
    return table, rows_B.to(device)


def copy_of(table: Prediction) -> Prediction:
    return Prediction(*(getattr(table, field.name).clone() for field in dataclasses.fields(table)))


def followers_of(rng: random.Random) -> tuple[list[Follower], list[list[int]]]:
    """Requests of several lengths, one without a prediction, and the texts that they will emit."""
    predicted = [[rng.randrange(VOCAB) for _ in range(size)] for size in (1, 40, 0, SIZE, 90)]
    texts = [edited(rng, each) or [1, 2, 3] for each in predicted]
    texts[4] = predicted[4] + predicted[4][:20]  # right to its end, and on
    return [Follower(each) for each in predicted], texts


@pytest.mark.parametrize("seed", range(2))
def test_following(seed: int, device: str) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    followers, texts = followers_of(rng)
    table, rows_B = table_of(followers, device)
    copy = copy_of(table)
    text_RC = torch.zeros(len(table.next_R), 25 * 7, dtype=torch.int32, device=device)
    departed = followed_all = 0
    for _ in range(25):
        counts = [rng.choice([0, 1, 1, 4, 7]) for _ in texts]
        tokens = [text[:count] for text, count in zip(texts, counts, strict=True)]
        texts = [text[count:] or [rng.randrange(VOCAB)] for text, count in zip(texts, counts, strict=True)]
        counts = [len(each) for each in tokens]
        packed = torch.tensor([[*each, *[-1] * (9 - len(each))] for each in tokens], device=device)
        length_B = torch.tensor([len(follower.text) - 1 for follower in followers], device=device)
        before = [follower.place for follower in followers]
        expected = [follower.emit(each) for follower, each in zip(followers, tokens, strict=True)]
        for row, follower in zip(rows_B.tolist(), followers, strict=True):
            text_RC[row, : len(follower.text)] = torch.tensor(follower.text, dtype=torch.int32)
        args = text_RC, rows_B, length_B, packed[:, :-1], torch.tensor(counts, device=device)
        found = [[place, count] for place, count in zip(before, expected, strict=True)]
        assert reference.follow_prediction(table, *args).tolist() == found
        assert prediction.follow_prediction(copy, *args).tolist() == found
        places = [follower.place for follower in followers]
        assert table.next_R[rows_B].tolist() == places
        assert torch.equal(copy.next_R, table.next_R)
        torch.testing.assert_close(copy.counts_R2, table.counts_R2)
        torch.testing.assert_close(copy.trust_R, table.trust_R)
        departed += sum(place < 0 for place in places)
        followed_all += sum(expected)
    assert departed
    assert followed_all


def emit(table: Prediction, rows_B: Tensor, texts: list[list[int]], start: int, count: int) -> None:
    """Follow ``count`` tokens of each text, from index ``start`` on."""
    text_RC = torch.zeros(len(table.next_R), len(texts[0]), dtype=torch.int32)
    text_RC[rows_B] = torch.tensor(texts, dtype=torch.int32)
    token_BS = text_RC[rows_B, start : start + count].long()
    length_B = torch.full((len(texts),), start - 1)
    reference.follow_prediction(table, text_RC, rows_B, length_B, token_BS, torch.full((len(texts),), count))


def test_an_inserted_and_a_deleted_span() -> None:
    """The place is found two tokens after an insertion, and after what was left out."""
    text = list(range(10, 40))
    for emitted, place in (
        ([*text[:5], 1, 2, 3, text[5], text[6]], 7),
        ([*text[:5], text[12], text[13]], 14),
        ([*text[:5], 1, text[5]], -6),
        ([*text[:20], *text[3:6]], 6),
    ):
        table, rows_B = table_of([Follower(text)], "cpu")
        for index in range(len(emitted)):
            emit(table, rows_B, [emitted], index, 1)
        assert table.next_R[rows_B].tolist() == [place], emitted


def test_the_longest_match_wins_then_the_next_one() -> None:
    for predicted, emitted, place in (
        ([1, 2, 9, 3, 1, 2, 8], [7, 3, 1, 2], 6),
        ([1, 2, 9, 1, 2, 8], [1, 2, 9, 0, 1, 2], 5),
        ([1, 2, 9, 1, 2, 8, 1, 2, 7], [0, 1, 2], 2),
    ):
        table, rows_B = table_of([Follower(predicted)], "cpu")
        for index in range(len(emitted)):
            emit(table, rows_B, [emitted], index, 1)
        assert table.next_R[rows_B].tolist() == [place]


def test_trust() -> None:
    """It begins as certainty; a text that keeps departing loses it within a few steps, one that follows keeps it."""
    text = list(range(10, 60))
    table, rows_B = table_of([Follower(text), Follower(text), Follower([])], "cpu")
    assert not table.trust_R.any()
    emitted: list[list[int]] = [[], [], []]
    for step in range(8):
        emitted[0] += text[5 * step : 5 * step + 5]
        emitted[1] += [text[2 * step], text[2 * step + 1], 1, 1, 1]
        emitted[2] += [1] * 5
        emit(table, rows_B, emitted, 5 * step, 5)
    followed, departed, none = table.trust_R[rows_B].exp().tolist()
    assert followed == none == 1
    assert departed < 0.8
    for _ in range(8):
        start = len(emitted[0])
        emitted = [[*each, text[3], text[4], 1] for each in emitted]
        emit(table, rows_B, emitted, start, 2)
        emit(table, rows_B, emitted, start + 2, 1)
    assert table.trust_R[rows_B[0]].exp() < 0.6


def test_a_likelier_candidate_stays(device: str) -> None:
    """A prediction that was often wrong takes no place of a draft that is surer, and the node's own token keeps what
    the draft gave it."""
    table = Prediction.empty(4, 5, torch.device(device))
    table.tokens_RP.copy_(torch.tensor([7, 8, 9, 10, 11]))
    table.length_R.fill_(5)
    table.trust_R.fill_(-1.0)
    rows_B = torch.arange(3, device=device)
    token_NC = torch.tensor([[1, 2], [7, 2], [1, 7]], device=device)
    logp_NC = torch.tensor([[-0.2, -0.9], [-0.5, -3.0], [-0.1, -2.0]], device=device)
    slots = Slots(rows_B, rows_B + 3, rows_B + 1, 1 + rows_B.repeat(40, 1).T.contiguous()[None], 16)
    for ops in (grow_reference, grow):
        pool = Pool.of_tree(3, 1, 2, torch.float32, torch.device(device))
        ops.grow_level(ops.root_level(slots, pool), token_NC, logp_NC, pool, slots, table)
        assert pool.tokens_BP.tolist() == [[1, 2], [7, 2], [1, 7]]
        assert torch.allclose(pool.scores_BP.cpu(), torch.tensor([[-0.2, -0.9], [-0.5, -3.0], [-0.1, -1.0]]))
    table.trust_R.fill_(-0.3)
    pool = Pool.of_tree(3, 1, 2, torch.float32, torch.device(device))
    grow.grow_level(grow.root_level(slots, pool), token_NC, logp_NC, pool, slots, table)
    assert pool.tokens_BP.tolist() == [[1, 7], [7, 2], [1, 7]]


@pytest.mark.parametrize(("k", "levels"), [(1, 4), (2, 3), (3, 3), (8, 2), (20, 2)])
def test_levels_take_what_is_predicted(k: int, levels: int, device: str) -> None:
    """The predicted path is in every pool as far as it goes, with score 0, whatever the draft offers."""
    torch.manual_seed(k)
    places = [(0, 9), (5, 6), (-3, 9), (0, 0), (4, 4), (2, 4)]  # next, and the length of the prediction
    slots = len(places)
    table = Prediction.empty(slots + 1, 9, torch.device(device))
    table.tokens_RP.copy_(torch.randint(40, (slots + 1, 9)))
    table.trust_R.fill_(0)  # certain: what the draft offers is less likely
    rows_B = torch.randperm(slots, device=device)
    table.next_R[rows_B], table.length_R[rows_B] = torch.tensor(places, device=device).unbind(1)
    length_B = torch.randint(1, 30, (slots,), device=device)
    pages_BM = 1 + torch.randperm(slots * 40, device=device).view(slots, 40)
    pools = [Pool.of_tree(slots, levels, k, torch.float32, torch.device(device)) for _ in range(2)]
    start = Slots(rows_B, torch.full_like(rows_B, 3), length_B, pages_BM[None], 16)
    expected: Level | None = grow_reference.root_level(start, pools[0])
    actual: Level | None = grow.root_level(start, pools[1])
    for _ in range(levels):
        assert expected is not None
        assert actual is not None
        nodes = slots * expected.width
        token_NC = torch.stack([torch.randperm(40)[:k] for _ in range(nodes)]).to(device)
        logp_NC = -torch.rand(nodes, k, device=device).cumsum(1) - 0.1
        expected = grow_reference.grow_level(expected, token_NC, logp_NC, pools[0], start, table)
        actual = grow.grow_level(actual, token_NC, logp_NC, pools[1], start, table)
        if expected is not None and actual is not None:
            for field in dataclasses.fields(expected):
                assert torch.equal(getattr(actual, field.name), getattr(expected, field.name)), field.name
    for name in ("tokens_BP", "parents_BP", "depths_BP", "scores_BP"):
        assert torch.equal(getattr(pools[1], name), getattr(pools[0], name)), name
    for slot, (place, length) in enumerate(places):
        tokens, parents, scores = (getattr(pools[0], name)[slot].tolist() for name in
                                   ("tokens_BP", "parents_BP", "scores_BP"))  # fmt: skip
        certain = [index for index, value in enumerate(scores) if value == 0]
        path = table.tokens_RP[rows_B[slot], max(place, 0) : max(length, 0)].tolist()[:levels]
        assert [tokens[index] for index in certain] == (path if place >= 0 else [])
        assert [parents[index] for index in certain] == [-1, *certain][: len(certain)]
        children = [(parent, token) for parent, token in zip(parents, tokens, strict=True)]
        assert len(set(children)) == len(tokens), "siblings differ"
