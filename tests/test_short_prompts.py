"""Captured prefill launches in fixed sizes, run eagerly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
import torch
from specserve_kernels import MAX_NODES

from specserve.core import SamplingParams
from specserve.engine.commands import Admit, Prefill, Row
from specserve.engine.graphs import Graphs
from specserve.engine.prompts import PROMPT_SIZES, PromptSize, short_prefill, size_for, sizes_within
from specserve.engine.runner import Runner
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.context import Context
from specserve.speculation.prefill import PrefillResult
from specserve.speculation.state import RowInit
from tests.engines import Answer, Checkpoints, Client, context_of

SHARED = [(7 * index) % 61 for index in range(40)]
PROMPTS = [
    [*SHARED, 3, 9],
    [*SHARED, 5],
    [1, 2, 3],
    [4],
    [*SHARED, *range(30), *range(60)],
    [*SHARED[:20], 8, 8],
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, frequency_penalty=0.5, max_tokens=9),
    SamplingParams(temperature=0, max_tokens=9, prediction=[3, 4, 5], logprobs=2),
    SamplingParams(temperature=1.1, seed=7, logit_bias={3: 2.0}, max_tokens=1),
    SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=1),
]


class Eager:
    """Replay without a graph."""

    def __init__(self, context: Context, size: PromptSize, ran: Counter[PromptSize]) -> None:
        self._context, self._size, self._ran = context, size, ran

    def replay(self, rows: Sequence[Row], dummy: int, words_BW: None) -> PrefillResult:
        self._ran[self._size] += 1
        result = short_prefill(self._context, self._size, torch.tensor(self._size.pack(rows, dummy)))
        assert self._context.state.slots.length[dummy] == 1
        return result


def answers(scheduler: Scheduler) -> list[Answer]:
    """Some together, and again, next to each other, with what the cache kept."""
    client = Client(scheduler)
    for turn, together in enumerate([[0, 1, 2, 3], [4, 5], [0, 1, 2, 3], [4], [5], [2], [0, 1, 2, 3, 4]]):
        for index in together:
            client.submit(f"{turn}-{index}", PROMPTS[index], PARAMS[index])
        for _ in range(3):
            client.iterate()
    client.run()
    return list(client.answers.values())


@pytest.mark.parametrize(
    ("algorithm", "shape", "sizes"),
    [
        ("EAGLE", (3, 1, 4), PROMPT_SIZES),
        ("EAGLE3", (3, 2, 7), (PromptSize(2, 12), PromptSize(5, 48))),
        ("P_EAGLE", (3, 2, 7), (PromptSize(2, 12), PromptSize(4, 120, longest=120))),
        ("P_EAGLE", (3, 2, 7), PROMPT_SIZES),
    ],
    ids=["eagle, ours", "eagle3, other", "p_eagle, long", "p_eagle, ours"],
)
def test_gives_what_launches_of_any_size_give(
    algorithm: str, shape: tuple[int, int, int], sizes: Sequence[PromptSize], agreeing: Checkpoints
) -> None:
    expected = answers(agreeing.scheduler(algorithm, shape, page_size=4))
    scheduler, ran = agreeing.scheduler(algorithm, shape, page_size=4), Counter[PromptSize]()
    context = context_of(scheduler)
    prompts = {size: Eager(context, size, ran) for size in sizes}
    scheduler.runner = Runner(context, Graphs({}, prompts))  # type: ignore[arg-type]
    found = answers(scheduler)
    for ours, theirs in zip(found, expected, strict=True):
        assert msgspec.structs.astuple(ours.usage) == msgspec.structs.astuple(theirs.usage)
        assert (ours.tokens, ours.runs, ours.finish_reason) == (
            theirs.tokens,
            theirs.runs,
            theirs.finish_reason,
        )
        assert [entry.logprob for entry in ours.logprobs] == pytest.approx(
            [e.logprob for e in theirs.logprobs]
        )
    assert sum(ran.values()) >= 4
    assert len(ran) >= 2
    scheduler.check_idle()


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize(
    ("size", "counts"),
    [
        (PromptSize(1, 16), [16]),
        (PromptSize(4, 64), [60, 4]),
        (PromptSize(8, 128, longest=128), [100, 28]),
        (PromptSize(8, 128, longest=128), [70, 1]),
    ],
    ids=str,
)
def test_leaves_what_an_ordinary_launch_leaves(
    algorithm: str, size: PromptSize, counts: list[int], agreeing: Checkpoints
) -> None:
    """In all that later steps read, where runs fill a size, too, and all padding is empty; twice, so that the second
    begins after the first."""
    contexts = [context_of(agreeing.scheduler(algorithm, (3, 1, 4), page_size=16)) for _ in range(2)]
    short = {size: Eager(contexts[1], size, ran := Counter[PromptSize]())}
    runners = [Runner(contexts[0]), Runner(contexts[1], Graphs({}, short))]  # type: ignore[arg-type]
    prompts = [[(3 + 7 * slot + i) % 61 for i in range(2 * count)] for slot, count in enumerate(counts)]
    pages = [range(1 + 16 * slot, 17 + 16 * slot) for slot in range(len(counts))]
    params = SamplingParams(temperature=0, max_tokens=9)
    for runner in runners:
        rows = [
            RowInit(slot, [(slot, 0, 0, pages[slot])], params, 0, 0, prompt, [], len(prompt) + 9, [], 0, 0, 0)
            for slot, prompt in enumerate(prompts)
        ]
        runner.change(Admit(rows))
    for part in range(2):
        launch = [
            Row(slot, params, (part + 1) * count, prompts[slot][part * count :][:count], final=part > 0)
            for slot, count in enumerate(counts)
        ]
        expected, found = (
            [emitted.tokens for emitted in runner.prefill(Prefill(launch)).read()] for runner in runners
        )
        assert found == expected
    assert ran[size] == 2
    ours, theirs = (context.pool for context in contexts)
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(layer[1:], other[1:])
    torch.testing.assert_close(ours.page_feature[1:], theirs.page_feature[1:])
    for name in ("root", "length", "feature"):
        one, other = (getattr(context.state.slots, name)[: len(counts)] for context in contexts)
        torch.testing.assert_close(one, other)


def test_what_fits() -> None:
    assert size_for([16], PROMPT_SIZES) == PromptSize(1, 16)
    assert size_for([64], PROMPT_SIZES) == PromptSize(1, 64)
    assert (
        size_for([65], PROMPT_SIZES) == size_for([100, 20], PROMPT_SIZES) == PromptSize(8, 128, longest=128)
    )
    assert size_for([40, 100], PROMPT_SIZES) == PromptSize(16, 256, longest=256)
    assert size_for([65, *[1] * 8], PROMPT_SIZES) == PromptSize(16, 256, longest=256)
    assert size_for([30] * 9, PROMPT_SIZES) == PromptSize(16, 384, longest=384)
    for tokens in (512, 640, 2048):
        assert size_for([tokens], PROMPT_SIZES) == PromptSize(16, tokens, longest=tokens)
    assert size_for([60, *[65] * 5], PROMPT_SIZES) == PromptSize(16, 512, longest=512)
    assert size_for([2049], PROMPT_SIZES) is None
    assert size_for([20, 30], PROMPT_SIZES) == size_for([16] * 4, PROMPT_SIZES) == PromptSize(4, 64)
    assert size_for([5] * 9, PROMPT_SIZES) == size_for([16] * 16, PROMPT_SIZES) == PromptSize(16, 256)
    assert size_for([1] * 17, PROMPT_SIZES) is None
    assert sizes_within(40, 8192) == [PromptSize(1, 16)]
    assert sizes_within(65, 8192) == [PromptSize(1, 16)]
    assert sizes_within(66, 8192) == [size for size in PROMPT_SIZES if size.longest == MAX_NODES]
    assert sizes_within(130, 8192)[-2:] == [PromptSize(8, 128, longest=128), PromptSize(16, 256)]
    assert sizes_within(514, 8192)[-1] == PromptSize(16, 512, longest=512)
    assert sizes_within(2050, 8192) == list(PROMPT_SIZES)
    assert sizes_within(2050, 600)[-1] == PromptSize(16, 640, longest=640)
    assert sizes_within(2050, 512)[-1] == PromptSize(16, 512, longest=512)


def run(slot: int, tokens: Sequence[int], final: bool = True) -> Row:
    return Row(slot, SamplingParams(), len(tokens), tokens, final)


def test_padding_takes_what_is_left() -> None:
    size = PromptSize(3, 12, longest=5)
    packed = size.pack([run(5, [7, 8, 9]), run(2, [4], final=False)], dummy=6)
    rows_B, chunks = size.unpack(torch.tensor(packed))
    assert rows_B.tolist() == [5, 2, 6, 6, 6, 6]
    assert chunks.final_B.tolist() == [True, *[False] * 5]
    assert chunks.q_start.tolist() == [0, 3, 4, 9, 12, 12, 12]
    assert chunks.slot_T.tolist() == [0, 0, 0, 1, *[2] * 5, *[3] * 3]
    assert chunks.token_T.tolist() == [7, 8, 9, 4, *[0] * 8]
    assert chunks.longest == 5


def test_padding_is_empty_where_nothing_is_left() -> None:
    size = PromptSize(2, 4, longest=4)
    chunks = size.unpack(torch.tensor(size.pack([run(5, [7, 8, 9, 4])], dummy=6)))[1]
    assert chunks.q_start.tolist() == [0, 4, 4, 4]
    assert chunks.slot_T.tolist() == [0] * 4
    assert chunks.longest == 4


@pytest.mark.parametrize("size", PROMPT_SIZES, ids=str)
def test_runs_fit_and_only_the_last_are_empty(size: PromptSize) -> None:
    """From no prompt at all, as at capture, to as many as fit, short and long."""
    for runs in range(size.runs + 1):
        for tokens in {1, min(size.longest, size.tokens // max(runs, 1))}:
            packed = size.pack([run(0, [5] * tokens)] * runs, dummy=1)
            starts = size.unpack(torch.tensor(packed))[1].q_start
            counts = starts.diff()
            assert len(counts) < size.tokens, "this many nodes are one for each"
            assert int(counts.max()) <= size.longest
            assert int(starts[-1]) == size.tokens
            assert not counts[int((counts > 0).sum()) :].any()
