"""The throughput log, written about every ten seconds of work."""

from __future__ import annotations

import msgspec
import pytest

from specserve.messages import Stats, StepTotals
from specserve.process.worker import Throughput


def test_a_line_for_ten_seconds_of_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log, idle = Throughput(), Stats(0, 0, 100, 100, 0, 0, 0, 0, 0, 0, 0, 0)

    def stats(tokens: int, requests: int, accepted: int) -> Stats:
        totals = StepTotals(requests=requests)
        return msgspec.structs.replace(
            idle,
            running=2,
            waiting=1,
            pages_free=25,
            generated_tokens=tokens,
            accepted=accepted,
            step_totals=totals,
        )

    log.look(idle, 0.0)
    log.look(idle, 100.0)
    log.look(stats(500, 200, 240), 105.0)
    assert not caplog.messages
    log.look(stats(1000, 400, 600), 110.0)
    log.look(stats(1100, 450, 650), 111.0)
    expected = (
        "100 tokens/s, 2.50 per request and step; 2 requests running, 1 waiting, 75% of KV pages in use"
    )
    assert caplog.messages == [expected]
