"""What a captured step is told before it is replayed."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from specserve.engine.graphs import StepGraph


def test_slots_are_copied_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph has a place of its own for them, and reads there what the step is for."""
    make, copied = torch.tensor, []

    def tensor(slots: list[int], pin_memory: bool) -> torch.Tensor:
        copied.append(list(slots))
        return make(slots)

    monkeypatch.setattr(torch, "tensor", tensor)
    read: list[list[int]] = []
    graphs = []
    for _ in range(2):
        rows_B = torch.full((2,), 9)
        replay = mock.Mock(side_effect=lambda rows_B=rows_B: read.append(rows_B.tolist()))
        graphs.append(StepGraph((mock.Mock(replay=replay),), rows_B, mock.Mock()))
    asked = [(0, [3, 1]), (0, [3, 1]), (1, [3, 1]), (0, [1, 3]), (1, [3, 1]), (0, [3, 1])]
    for index, slots in asked:
        given = list(slots)
        graphs[index].replay(given)
        given[0] = 7  # the caller's own
    assert read == [slots for _, slots in asked]
    assert copied == [[3, 1], [3, 1], [1, 3], [3, 1]]
