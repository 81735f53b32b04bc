"""The number of threads of an engine on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from specserve.engine import threads
from tests.engines import context_of, make_scheduler
from tests.reference.models import make_llama


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("", 8)]
)
def test_a_container_s_quota_counts(tmp_path: Path, text: str, cores: int) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    with patch.object(os, "sched_getaffinity", lambda _: range(8)):
        assert threads.usable_cores(quota) == cores
        assert threads.usable_cores(tmp_path / "none") == 8


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 4.0, 2: 2.0, 4: 1.0, 6: 0.7}, 6),
        ({1: 4.0, 2: 2.0, 4: 1.9, 6: 0.7}, 2),
        ({1: 1.0, 2: 3.0}, 1),
    ],
)
def test_more_threads_must_gain(tmp_path: Path, seconds: dict[int, float], chosen: int) -> None:
    context = context_of(make_scheduler(make_llama(tmp_path / "target")))
    before = torch.get_num_threads()
    try:
        with patch.object(threads, "eager_seconds", lambda *_: seconds[torch.get_num_threads()]):
            threads.choose_threads(context, 6)
        assert torch.get_num_threads() == chosen
    finally:
        torch.set_num_threads(before)
