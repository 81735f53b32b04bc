"""Graphs share one buffer for the target's logits; results are the same as without sharing."""

from __future__ import annotations

import torch

from specserve.core import SamplingParams
from specserve.speculation.context import View
from specserve.speculation.shape import StepShape
from specserve.speculation.state import Needs
from specserve.speculation.step import step
from tests.engines import Checkpoints, Client, context_of, requests_of


@torch.inference_mode()
def test_logits_written_to_a_shared_place(agreeing: Checkpoints) -> None:
    shape = StepShape(1, 6, 3, 2)
    found = []
    for nodes in (None, 9):
        scheduler = agreeing.scheduler("EAGLE3", (3, 2, 6))
        client = Client(scheduler)
        client.submit("r", [3, 9, 27, 17, 5], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        client.iterate()
        context, (request,) = context_of(scheduler), requests_of(scheduler)
        place = (
            None if nodes is None else torch.full((nodes, context.vocab_size), torch.nan, dtype=torch.float64)
        )
        rows_B = torch.tensor([request.slot])
        length = int(context.state.slots.length[request.slot])
        view = View.of(context, rows_B, length, Needs(), place)
        result = step(context, view, shape)
        assert place is None or result.logits_TV.data_ptr() == place.data_ptr()
        found.append((result.accepted.packed_BX, result.logits_TV))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
