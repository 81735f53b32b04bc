"""Device memory: what a process may use, the pool's size, and launches that run out: batches shrink, and a request
fails only if it fails alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from torch import OutOfMemoryError

from specserve.core import SamplingParams
from specserve.engine.commands import Prefill, Row, Step
from specserve.engine.memory import LEAST_TOKENS, DeviceMemory, host_memory
from specserve.kv.spec import HeadKV, zeros
from specserve.models.read_config import load_model_config
from specserve.scheduler.limits import CALM, LEAST_CHUNK, OOMBackoff
from specserve.scheduler.scheduler import Scheduler
from tests.engines import Checkpoints, Client, answer_all, context_of, make_scheduler, requests_of
from tests.reference.models import make_qwen3_5

WORK = [
    ([token, 3, 5, *range(token % 7)], SamplingParams(max_tokens=16, temperature=0)) for token in range(6)
]


def scarce(scheduler: Scheduler, name: str, fits: Callable[[Sequence[Row]], bool]) -> Any:
    """The runner's step or prefill raises unless ``fits``, having done its work as far as the cache goes."""
    launch = getattr(scheduler.runner, name)

    def launch_or_raise(command: Prefill | Step) -> Any:
        done = launch(command)
        if not fits(command.rows):
            raise OutOfMemoryError("CUDA out of memory, says the test")
        return done

    return patch.object(scheduler.runner, name, launch_or_raise)


@pytest.fixture(params=["on", "off"])
def scheduler(request: pytest.FixtureRequest, agreeing: Checkpoints) -> Scheduler:
    overlap = request.param
    return agreeing.scheduler(
        "EAGLE3", (3, 2, 6), dtype="float64", page_size=4, overlap_schedule=overlap, chunked_prefill_size=64
    )


@pytest.fixture(scope="module")
def expected(agreeing: Checkpoints) -> list[list[int]]:
    """The texts of ``WORK``."""
    return [answer.tokens for answer in answer_all(make_scheduler(agreeing.target), WORK)]


@pytest.mark.parametrize("most", [1, 2])
def test_steps_that_are_too_large(most: int, scheduler: Scheduler, expected: list[list[int]]) -> None:
    with scarce(scheduler, "step", lambda rows: len(rows) <= most):
        found = answer_all(scheduler, WORK)
    assert [answer.tokens for answer in found] == expected
    assert not any(answer.refused for answer in found)
    assert scheduler.stats().preemptions > 0
    assert not scheduler.memory.problems()


def test_prompts_that_are_too_long_at_once(scheduler: Scheduler, expected: list[list[int]]) -> None:
    with scarce(scheduler, "prefill", lambda rows: sum(len(row.tokens) for row in rows) <= LEAST_CHUNK):
        found = answer_all(scheduler, WORK)
    assert [answer.tokens for answer in found] == expected
    assert not scheduler.memory.problems()


@pytest.mark.parametrize("launch", ["step", "prefill"])
def test_one_that_never_fits_fails_alone(
    launch: str, scheduler: Scheduler, expected: list[list[int]]
) -> None:
    client = Client(scheduler)
    for index, (prompt, params) in enumerate(WORK):
        client.submit(str(index), prompt, params)

    def fits(rows: Sequence[Row]) -> bool:
        slots = {request.slot for request in requests_of(scheduler) if request.rid == "2"}
        return not slots & {row.slot for row in rows}

    with scarce(scheduler, launch, fits):
        answers = client.run()
    bad = answers.pop("2")
    assert bad.refused == ("out of device memory: CUDA out of memory, says the test")
    assert [answer.tokens for answer in answers.values()] == [*expected[:2], *expected[3:]]
    assert not scheduler.memory.problems()


def test_limits_come_back() -> None:
    backoff = OOMBackoff(16, 512)
    assert backoff.fall(16, 0)
    assert backoff.fall(1, 100)
    assert (backoff.requests, backoff.chunk, backoff.prompts) == (8, 50, 16)
    assert backoff.fall(3, 20)
    assert backoff.fall(3, 9)
    assert (backoff.requests, backoff.chunk, backoff.prompts) == (8, LEAST_CHUNK, 1)
    assert not backoff.fall(1, 9)
    assert backoff.lowered
    for _ in range(15 * CALM):
        backoff.worked()
    assert (backoff.requests, backoff.chunk, backoff.prompts) == (16, 512, 16)
    assert not backoff.lowered


def test_a_prompt_that_is_too_long_holds_up_no_step(scheduler: Scheduler) -> None:
    """Those that decode go on together, and the prompt gets through in pieces, however often a larger one fails."""
    client, batches = Client(scheduler), []
    for index, (prompt, params) in enumerate(WORK):
        client.submit(str(index), prompt, msgspec.structs.replace(params, max_tokens=60))
    for _ in range(8):
        client.iterate()
    client.submit("long", [7] * 200, SamplingParams(max_tokens=2, temperature=0))
    step = scheduler.runner.step

    def counted(command: Step) -> Any:
        batches.append(len(command.rows))
        return step(command)

    few = scarce(scheduler, "prefill", lambda rows: sum(len(row.tokens) for row in rows) <= LEAST_CHUNK)
    with few, patch.object(scheduler.runner, "step", counted):
        answers = client.run()
    assert not any(answer.refused for answer in answers.values())
    assert max(batches) >= len(WORK)
    assert batches[1] >= len(WORK) - 1


def test_wrong_books_are_loud(scheduler: Scheduler, caplog: pytest.LogCaptureFixture) -> None:
    answer_all(scheduler, WORK)
    scheduler.check_idle()
    assert scheduler.stats().violations == 0
    assert scheduler.memory.cache is not None
    page = next(scheduler.memory.cache.pages())
    scheduler.memory.allocator.allocate(2)
    scheduler.memory.allocator.share([page])
    scheduler._free_slots.pop()  # private: a fault
    with caplog.at_level(logging.ERROR):
        scheduler.check_idle()
    assert scheduler.stats().violations == 3
    for words in ("pages leaked", f"still in use, page {page} among", "free slots are"):
        assert words in caplog.text


MEMINFO = {"proc/meminfo": "MemTotal: 16000 kB\nMemFree: 100 kB\nMemAvailable: 9000 kB\nHugePages_Total: 0\n"}
STAT = "inactive_file {0}\nactive_file 1024\nfile 99999999\n"
V2 = {
    "proc/self/cgroup": "1:cpu:/x\n0::/pod/it\n",
    "sys/fs/cgroup/pod/it/memory.max": "max\n",
    "sys/fs/cgroup/pod/it/memory.current": "1\n",
    "sys/fs/cgroup/pod/it/memory.stat": STAT.format(0),
    "sys/fs/cgroup/pod/memory.max": "8192000\n",
    "sys/fs/cgroup/pod/memory.current": "6144000\n",
    "sys/fs/cgroup/pod/memory.stat": STAT.format(2048),
}
V1 = {
    "proc/self/cgroup": "9:cpu,memory:/docker/123\n0::/\n",  # its own group is the root of what it sees
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096000",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1024000",
    "sys/fs/cgroup/memory/memory.stat": f"{STAT.format(5)}total_inactive_file 1000\ntotal_active_file 24\n",
}
UNLIMITED = {**V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}"}


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        (MEMINFO, 16000 * 1024, 9000 * 1024),
        (MEMINFO | V2, 8192000, 8192000 - 6144000 + 2048 + 1024),
        (MEMINFO | V1, 4096000, 4096000 - 1024000 + 1000 + 24),
        (MEMINFO | UNLIMITED, 16000 * 1024, 9000 * 1024),
    ],
    ids=["machine", "v2", "v1", "no limit"],
)
def test_what_a_process_may_use(files: dict[str, str], total: int, free: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_memory(tmp_path) == DeviceMemory(total, free)


def test_a_system_that_does_not_tell_what_is_free(tmp_path: Path) -> None:
    found = host_memory(tmp_path)
    assert found.total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 <= found.free < found.total / 2


def pool_of(model: Path, free: int, **settings: Any) -> int:
    """Tokens of the pool of an engine that finds ``free`` bytes left of 2**40."""
    with patch("specserve.engine.memory.host_memory", return_value=DeviceMemory(2**40, free)):
        held = make_scheduler(model, max_total_tokens=None, **settings).info.max_total_tokens
    assert isinstance(held, int)
    return held


def test_a_pool_is_as_large_as_the_free_memory_allows(
    random_models: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens take 512 bytes. A context that was chosen must fit; of the model's own, what fits is served."""
    target = random_models.target
    caplog.set_level(logging.INFO)
    assert pool_of(target, 2**34) == LEAST_TOKENS
    assert f"max_total_tokens = {LEAST_TOKENS}: the device is cpu, the larger of" in caplog.text
    assert "--context-length" not in caplog.text
    token_bytes = context_of(make_scheduler(target)).pool.config.page_bytes // 16
    assert pool_of(target, 2000 * token_bytes, mem_fraction_static=0.5) == 1008  # whole pages
    assert "max_total_tokens = 1008: what 0.5 of the 0.00 GiB that are free" in caplog.text
    longest = load_model_config(target).max_position_embeddings
    free = (longest - 64) * token_bytes
    assert pool_of(target, free, mem_fraction_static=1.0) == longest - 64
    words = f"holds {longest - 64} tokens of KV cache"
    assert f"{words}, fewer than the model's {longest}: longer requests are refused" in caplog.text
    with pytest.raises(
        ValueError, match=f"^--context-length: .*{words}, expected at most that, found {longest - 1}"
    ):
        pool_of(target, free, mem_fraction_static=1.0, context_length=longest - 1)
    with pytest.raises(ValueError, match=r"^--mem-fraction-static 0\.85: 0\.0 of 1024\.0 GiB are free"):
        pool_of(target, 0)


@pytest.mark.parametrize(
    ("taken", "others", "fraction", "left"),
    [
        (20, 1, 0.85, 64),
        (20, 0, 0.95, 75),
        (20, 0, 0.45, 25),
        (20, 45, 0.45, 20),
        (18, 54, 0.28, 10),
        (18, 67, 0.28, 0),
    ],
)
def test_programs_share_a_gpu(taken: int, others: int, fraction: float, left: int) -> None:
    """Each has a fraction of all of it, as far as the others leave that and some headroom."""
    assert DeviceMemory(100, 100 - taken - others, taken).within(fraction) == left


def test_states_count_beside_a_pool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Though on a CPU they take no memory before requests run. Those of prefixes take a third of the rest."""
    target = make_qwen3_5(tmp_path)
    context = context_of(make_scheduler(target))
    assert context.states is not None
    free = context.states.nbytes + 3000 * context.pool.config.page_bytes // 16
    assert pool_of(target, free, mem_fraction_static=0.5) == 1008  # whole pages
    assert "--max-running-requests" not in caplog.text
    assert pool_of(target, free, mem_fraction_static=0.2) == 400
    assert "requests are refused; states take 0.0 GiB, less with a smaller --max-running" in caplog.text
    fit = free * context.states.rows // context.states.nbytes - 1
    words = f"--max-running-requests: 257 states take .* GiB, .* are free .*; expected at most {fit}"
    with pytest.raises(ValueError, match=words):
        pool_of(target, free, max_running_requests=257)


def test_a_pool_that_the_memory_does_not_hold(
    random_models: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        ValueError, match=r"^--max-total-tokens: a KV pool of 9007199254740976 tokens takes .* GiB"
    ):
        make_scheduler(random_models.target, max_total_tokens=2**53 - 16)
    with patch("specserve.engine.memory.host_memory", return_value=DeviceMemory(2**40, 2**10)):
        make_scheduler(random_models.target, max_total_tokens=64)
    assert "--max-total-tokens: a KV pool of 64 tokens takes 0.0 GiB, and 0.0 are free" in caplog.text


def test_a_pool_takes_memory_as_it_fills() -> None:
    """On a CPU, and holds zeros until then."""
    spec, cpu = HeadKV(8, 64, torch.bfloat16), torch.device("cpu")
    before = resident()
    layers = spec.view(zeros((2, 16384, 16 * spec.token_bytes), torch.uint8, cpu), 16)
    assert (layers.shape, layers.dtype) == ((2, 16384, 2, 16, 8, 64), torch.bfloat16)
    assert layers.nbytes == 2**30
    assert not layers[:, ::1000].any()
    layers[1, 7] = 1
    assert layers[1, 6:9].float().sum() == layers[1, 7].numel()
    assert resident() - before < 2**28
    assert zeros((3, 0), torch.float32, cpu).shape == (3, 0)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
