"""Layers that keep a state: what is reused of a text's beginning, and that texts are those of a cold run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve import SamplingParams
from specserve.config import make_settings
from specserve.engine.commands import decode
from specserve.engine.executor import Executor
from specserve.kv import states
from specserve.process.assemble import resolve_engine
from specserve.scheduler import memory, points, prompt_chunk, scheduler
from specserve.scheduler.points import Snapshots
from tests.engines import Answer, Client, answer_all, context_of, make_scheduler
from tests.reference.models import make_qwen3_5
from tests.test_commands import Recorder

END, PAGE = 2, 4
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
DRAWS = random.Random(1)
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def text(length: int) -> list[int]:
    return [DRAWS.randrange(3, 64) for _ in range(length)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_qwen3_5(tmp_path_factory.mktemp("target"))
    config = path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": END}))
    return path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of 8 tokens, snapshots every 32; a launch costs as much as 8."""
    with monkeypatch.context() as patched:
        patched.setattr(states, "BLOCK", 8)
        patched.setattr(points, "INTERVAL", 32)
        for module in (memory, points, prompt_chunk, scheduler):
            patched.setattr(module, "LAUNCH_COST", 8)
        yield


class Engines:
    """One with a prefix cache, whose answers are compared with those of one without."""

    def __init__(self, target: Path, **settings: Any) -> None:
        self.scheduler = make_scheduler(target, page_size=PAGE, **settings)
        self.cold = make_scheduler(target, disable_radix_cache=True)
        self.known = dict[tuple[int, ...], list[int]]()

    def answers(self, *prompts: Sequence[int], tokens: int = 8) -> list[Answer]:
        """To prompts that come together."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        new = [prompt for prompt in prompts if (tokens, *prompt) not in self.known]
        for prompt, answer in zip(new, answer_all(self.cold, [(each, params) for each in new]), strict=True):
            self.known[tokens, *prompt] = answer.tokens
        found = answer_all(self.scheduler, [(prompt, params) for prompt in prompts])
        assert [each.tokens for each in found] == [self.known[tokens, *prompt] for prompt in prompts]
        self.check()
        return found

    def cached(self, *prompts: Sequence[int]) -> list[int]:
        return [each.cached_tokens for each in self.answers(*prompts)]

    def check(self) -> None:
        self.scheduler.check_idle()
        assert not self.scheduler.stats().violations


def test_points() -> None:
    """Ends of pages with 32 tokens between, where texts branch, and of messages and prompts that are not close."""
    snapshots = Snapshots(9, {END})
    lengths = 9, 3, 20, 2, 4, 6
    chat = [token for length in lengths for token in (*text(length - 1), END)] + text(3)
    assert snapshots.points(chat, 0, 0, PAGE) == [8, 32, 44]
    assert snapshots.points(chat, 8, 20, PAGE) == [20, 32, 44]
    assert snapshots.points(text(80), 0, 40, PAGE) == [32, 40, 64, 76]
    assert snapshots.points(text(70), 0, 4, PAGE) == [32, 64]
    assert snapshots.points(text(70), 32, 32, PAGE, forked=True) == [64, 68]
    assert snapshots.points([*text(6), END], 0, 0, 64) == []
    assert Snapshots(4, {END}).points(text(170), 0, 0, PAGE) == [96, 168], "half of the room"


def test_hits_have_the_text_of_a_cold_run(target: Path) -> None:
    """At ends of messages and prompts, where texts branch, and in between; in trees, and chunks that end elsewhere."""
    engines = Engines(target, chunked_prefill_size=23, speculative_algorithm="NGRAM", **TREE)
    system, begin = [*text(17), END], text(3)
    assert engines.cached([*system, *text(7), END, *begin]) == [0]
    turn = [*system, *text(10), END, *begin]
    (answer,) = engines.answers(turn)
    assert answer.cached_tokens == 16, "the message, in whole pages"
    turn += [*answer.tokens, END, *text(11), END, *begin]
    assert engines.cached(turn, turn) == [28, 52], "its last message; the other of a fork"
    assert engines.cached(turn) == [52]
    raw, shared = text(60), 52
    assert engines.cached(raw) == [0]
    assert engines.cached(raw) == [56], "all but the last token's page"
    assert [engines.cached([*raw[:shared], *text(9)]) for _ in range(3)] == [[32], [52], [52]]
    assert engines.scheduler.stats().cached_tokens == 16 + 28 + 52 + 52 + 56 + 32 + 52 + 52
    begin = text(48)
    assert engines.cached(*([*begin, *text(5)] for _ in range(3))) == [0, 48, 48], (
        "who comes first cuts for others"
    )


def test_few_snapshots_and_pages(target: Path) -> None:
    """The snapshot used least recently makes room, and those go whose pages go. Pages without one are computed again,
    and preempted requests go on."""
    engines = Engines(target, max_running_requests=3, max_mamba_cache_size=5)
    first, second, third = (text(20) for _ in range(3))
    assert [engines.cached(each) for each in (first, second, first, third, first, second)] == [
        *([0], [0], [16]),
        *([0], [16], [0]),
    ]
    engines = Engines(target, max_running_requests=4, max_mamba_cache_size=9, max_total_tokens=72)
    prompts = [[*first[: 4 * DRAWS.randint(1, 5)], *text(12)] for _ in range(12)]
    assert sum(each.cached_tokens for each in engines.answers(*prompts, tokens=16)) > 20
    assert engines.scheduler.stats().preemptions > 1
    engines.scheduler.flush_cache()
    assert not engines.scheduler.stats().snapshots_kept
    assert engines.cached(first) == [0]


def test_short_ends_wait_for_a_step_of_others(target: Path) -> None:
    client = Client(make_scheduler(target, page_size=PAGE, overlap_schedule="on"))
    found = []
    for index in range(2):
        client.submit(str(index), text(50), PARAMS)
        client.iterate()
        found.append(client.scheduler.running[-1].prefilled)
    assert found == [50, 48]
    client.run()


def test_aborts(target: Path) -> None:
    """Within a prompt, and while it waits for one that has the same beginning."""
    engines, prompt = Engines(target, chunked_prefill_size=40), text(90)
    client = Client(engines.scheduler)
    for name in ("first", "waits"):
        client.submit(name, prompt, PARAMS)
    client.iterate()
    assert [request.prefilled for request in engines.scheduler.running] == [40, 0]
    for name in ("waits", "first"):
        engines.scheduler.abort(name)
    engines.check()
    assert engines.cached(prompt) == [32]


def test_other_ranks_keep_the_same(target: Path) -> None:
    first, second = (make_scheduler(target, page_size=PAGE) for _ in range(2))
    first.runner.followers = recorder = Recorder()
    prompt = text(40)
    assert [answer_all(first, [(prompt, PARAMS)])[0].cached_tokens for _ in range(2)] == [0, 32]
    follower = Executor(context_of(second), {})
    for message in recorder.sent:
        follower.run(decode(message))
    for part in ("states", "snapshots"):
        kept, other = (getattr(context_of(each), part).kept for each in (first, second))
        assert all(map(torch.equal, kept, other))
        assert kept.key_REJD.any()


def test_settings(target: Path) -> None:
    def notes(**given: Any) -> str:
        settings = make_settings(model_path=str(target), skip_tokenizer_init=True, **given)
        return "\n".join(resolve_engine(settings)[1])

    words = "--max-mamba-cache-size: expected more than the 16 states of --max-running-requests, found 16"
    with pytest.raises(ValueError, match=words):
        notes(max_mamba_cache_size=16)
    given = {"mamba_full_memory_ratio": 0.9, "disable_radix_cache": True}
    assert "--mamba-full-memory-ratio has no effect: no prefix is cached" in notes(**given)
    small, large = (make_scheduler(target, mamba_full_memory_ratio=ratio).info.states for ratio in (0.1, 0.5))
    assert 4 * small["prefixes"] < large["prefixes"]
    assert small["memory_bytes"] < large["memory_bytes"]
