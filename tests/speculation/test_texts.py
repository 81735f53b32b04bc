"""The texts on the device are those that clients get, however they were generated."""

from __future__ import annotations

import pytest

from specserve.core import SamplingParams
from tests.engines import Checkpoints, Client, context_of, requests_of

PROMPTS = [[(7 * i + j) % 61 for j in range(20 + 9 * i)] for i in range(4)]


@pytest.mark.parametrize("pool", [92, 2000], ids=["preempted", "roomy"])
@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 2, 6)])
def test_tables_hold_what_is_known(shape: tuple[int, int, int], pool: int, agreeing: Checkpoints) -> None:
    scheduler = agreeing.scheduler(
        "EAGLE3", shape, page_size=4, chunked_prefill_size=16, max_total_tokens=pool, overlap_schedule="off"
    )
    client, compared = Client(scheduler), 0
    tokens, length = (getattr(context_of(scheduler).state.slots, name) for name in ("tokens", "length"))
    for round_ in range(2):  # the second finds its prefixes in the cache
        for index, prompt in enumerate(PROMPTS):
            client.submit(f"{round_}-{index}", prompt, SamplingParams(max_tokens=24, seed=index))
        while scheduler.has_work:
            client.iterate()
            for request in requests_of(scheduler):
                if request.output and not request.prefilling:
                    known = [*request.prompt, *request.output]
                    assert int(length[request.slot]) == len(known) - 1
                    assert tokens[request.slot, : len(known)].tolist() == known
                    compared += 1
    assert compared > 60
    assert (scheduler.stats().preemptions > 0) == (pool < 100)
    assert (scheduler.stats().cached_tokens > 0) == (pool > 100)
