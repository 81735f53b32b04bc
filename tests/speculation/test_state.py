"""Requests that get their slots together have the same state as if each had come alone."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from specserve.core import SamplingParams, Speculation
from specserve.speculation.state import DecodeState, RowInit, to_device

CPU = torch.device("cpu")
VOCAB, PAGES = 50, 6
PAGE_FEATURE = torch.arange(60.0).view(20, 3)


def row(slot: int, pages: list[int], cached: int = 0, **params: Any) -> RowInit:
    return RowInit(
        slot=slot,
        pages=[(slot, 0, 0, pages)],
        params=SamplingParams(**params),
        seed=2**62 + slot,
        choice=slot % 2,
        prompt=[3, 4, 4, 7],
        output=[9, 9] if slot == 2 else [],
        limit=30 + slot,
        stop_ids=(1, 2),
        banned_until=11,
        cached=cached,
        last_cached_page=pages[cached // 2 - 1] if cached else 0,
    )


ROWS = [
    row(4, [5, 6, 7], temperature=0),
    row(0, [8], temperature=0.7, top_k=5, top_p=0.25, min_p=0.125, min_tokens=2, logit_bias={7: -2.5}),
    row(2, [9, 10, 11, 12], cached=4, frequency_penalty=0.5, presence_penalty=-0.25),
    row(1, [13, 14], cached=2, repetition_penalty=1.5, prediction=[3, 9, 9, 4]),
    row(5, [15], temperature=0, speculation=Speculation(enabled=False), prediction=[5, 6]),
]


def admitted(*launches: list[RowInit]) -> DecodeState:
    """After others have had the slots."""
    state = DecodeState(6, 2 * PAGES, 2, 3, VOCAB, torch.float32, CPU, prediction_size=8)
    for _, table in tables(state):
        table[: state.dummy] = 1
    for rows in launches:
        state.admit(rows, PAGE_FEATURE)
    return state


def tables(state: DecodeState) -> list[tuple[str, Tensor]]:
    parts = state.slots, state.sampling, state.prediction
    found = [(field.name, getattr(part, field.name)) for part in parts if part for field in fields(part)]
    return [(name, table[0] if name == "pages" else table) for name, table in found]


def test_together_as_one_by_one() -> None:
    both = zip(tables(admitted(ROWS)), tables(admitted(*([each] for each in ROWS))), strict=True)
    for (name, together), (_, alone) in both:
        if name == "pages":  # what comes after a request's own is never read
            continue
        assert torch.equal(together, alone), name


def test_each_row_is_what_was_asked_for() -> None:
    state = admitted(ROWS)
    slots, sampling, prediction = state.slots, state.sampling, state.prediction
    assert prediction is not None
    taken = [each.slot for each in ROWS]
    for each in ROWS:
        ((_, _, _, pages),) = each.pages
        assert slots.pages[0, each.slot, : len(pages)].tolist() == pages
    assert slots.tokens[1, :3].tolist() == [3, 4, 1], "what is cached, then what another left"
    assert slots.tokens[2, :5].tolist() == [3, 4, 4, 7, 1]
    assert slots.length[taken].tolist() == [0, 0, 4, 2, 0]
    assert slots.limit[taken].tolist() == [34, 30, 32, 31, 35]
    assert slots.root[taken].tolist() == [0] * 5
    assert slots.draft_cap[taken].tolist() == [2**62] * 4 + [0]
    assert slots.feature[taken].tolist() == [[0, 0, 0], [0, 0, 0], [30, 31, 32], [39, 40, 41], [0, 0, 0]]
    assert sampling.temperature[taken].tolist() == [0, torch.tensor(0.7).item(), 1, 1, 0]
    assert torch.equal(sampling.draft_temperature[taken], sampling.temperature[taken])
    assert sampling.top_k[taken].tolist() == [0, 5, 0, 0, 0]
    assert sampling.top_p[taken].tolist() == [1, 0.25, 1, 1, 1]
    assert sampling.min_p[taken].tolist() == [0, 0.125, 0, 0, 0]
    assert sampling.frequency[taken].tolist() == [0, 0, 0.5, 0, 0]
    assert sampling.presence[taken].tolist() == [0, 0, -0.25, 0, 0]
    assert sampling.repetition[taken].tolist() == [1, 1, 1, 1.5, 1]
    assert sampling.seed[taken].tolist() == [2**62 + slot for slot in taken]
    assert sampling.choice[taken].tolist() == [0, 0, 0, 1, 1]
    assert sampling.bias_count[taken].tolist() == [0, 3, 0, 0, 0]
    assert sampling.bias_ids[0, :4].tolist() == [7, 1, 2, VOCAB]
    assert sampling.bias_values[0, :3].tolist() == [-2.5, -torch.inf, -torch.inf]
    assert (sampling.bias_ids[[4, 2, 1, 5]] == VOCAB).all()
    assert sampling.counts[2].nonzero().tolist() == [[9]]
    assert sampling.in_prompt[1].nonzero().flatten().tolist() == [3, 4, 7]
    assert prediction.length_R[taken].tolist() == [0, 0, 0, 4, 0]
    assert prediction.tokens_RP[1, :4].tolist() == [3, 9, 9, 4]


def test_other_rows_stay_as_they_were() -> None:
    before, after = admitted(), admitted(ROWS)
    for (name, table), (_, changed) in zip(tables(before), tables(after), strict=True):
        assert torch.equal(table[[3, 6]], changed[[3, 6]]), name


def test_numbers_reach_the_device_as_they_are() -> None:
    largest = [2**63 - 1, -(2**63), 0]
    assert to_device(largest, CPU).tolist() == largest
    assert to_device((0.1, -torch.inf), CPU, torch.float64).tolist() == [0.1, -torch.inf]
    assert to_device(range(3), CPU, torch.int32).tolist() == [0, 1, 2]
    assert to_device([], CPU, torch.float32).shape == (0,)
