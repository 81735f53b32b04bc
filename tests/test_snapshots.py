"""Layers that keep a state: what is reused of a text's beginning, and that texts are those of a cold run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve import SamplingParams
from specserve.config import make_settings
from specserve.engine.commands import decode
from specserve.engine.executor import Executor
from specserve.engine.memory import DeviceMemory, count_bytes
from specserve.kv import states
from specserve.kv.spec import DeltaState
from specserve.process.assemble import create_shapes, resolve_engine
from specserve.scheduler import memory, points, prompt_chunk, scheduler
from specserve.scheduler.points import Snapshots
from tests.engines import Answer, Client, answer_all, context_of, make_scheduler, shaped
from tests.reference.models import make_qwen3_5
from tests.test_commands import Recorder

END, PAGE = 2, 4
TREE = shaped(3, 2, 6)
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
        self.scheduler = make_scheduler(target, **{"page_size": PAGE, **settings})
        self.cold = make_scheduler(target, disable_radix_cache=True)
        self.known = dict[tuple[int, ...], list[int]]()

    def answers(self, *prompts: Sequence[int], tokens: int = 8, stop: int = -1) -> list[Answer]:
        """To prompts that come together. ``stop``: a token that ends them."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        params.stop_token_ids = [stop] if stop >= 0 else []
        new = [prompt for prompt in prompts if (tokens, stop, *prompt) not in self.known]
        for prompt, answer in zip(new, answer_all(self.cold, [(each, params) for each in new]), strict=True):
            self.known[tokens, stop, *prompt] = answer.tokens
        found = answer_all(self.scheduler, [(prompt, params) for prompt in prompts])
        assert [each.tokens for each in found] == [self.known[tokens, stop, *prompt] for prompt in prompts]
        self.check()
        return found

    def cached(self, *prompts: Sequence[int], tokens: int = 8) -> list[int]:
        return [each.cached_tokens for each in self.answers(*prompts, tokens=tokens)]

    def check(self) -> None:
        self.scheduler.check_idle()
        assert not self.scheduler.stats().violations


def test_points() -> None:
    """Ends of pages with 32 tokens between, where texts branch, and of messages and prompts that are not close. Those
    that are only passed: at intervals, and of messages in the middle."""

    def points(tokens: Sequence[int], *known: int, room: int = 9, forked: bool = False) -> list[int]:
        found = Snapshots(room, {END}, 8).points(tokens, *known, forked)
        passed.append([point for point, passing in found.items() if passing])
        return list(found)

    passed = list[list[int]]()
    lengths = 9, 3, 20, 2, 4, 6
    chat = [token for length in lengths for token in (*text(length - 1), END)] + text(3)
    assert points(chat, 0, 0, PAGE) == [8, 32, 47]
    assert points(chat, 8, 20, PAGE) == [20, 32, 47]
    assert points(text(80), 0, 40, PAGE) == [32, 40, 64], "its last page is whole, so that 76 would be a cut"
    assert points([*text(76), END, *text(3)], 0, 40, PAGE) == [32, 40, 64, 76]
    assert points(text(70), 0, 4, PAGE) == [32, 64]
    assert points(text(70), 32, 32, PAGE, forked=True) == [64, 70]
    assert points(text(74), 64, 64, 16, forked=True) == []
    assert points(text(74), 32, 32, 16, forked=True) == [64], "another block has begun"
    assert points([*text(6), END], 0, 0, 64) == []
    assert points(text(170), 0, 0, PAGE, room=4) == [96, 170], "half of the room"
    turns = [*text(15), END] * 10
    assert points(turns, 0, 0, PAGE, room=8) == [16, 32, 64, 96, 128, 156], "of all but two"
    assert points(turns, 0, 0, PAGE, room=16) == [16, 32, 64, 96, 112, 128, 156]
    assert passed[:10] == [[32], [32], [32], [32, 64], [32], [64], [], [], [], [96]], (
        "not what stands for the end"
    )
    assert passed[10:] == [[32, 64, 96, 128], [32, 64, 96, 112, 128]]
    chat[9:12] = [[]] * 3  # type: ignore[list-item]
    assert points(chat, 12, 20, PAGE) == [20, 32, 47], (
        "what is cached is not looked at after the first message"
    )


def test_hits_have_the_text_of_a_cold_run(target: Path) -> None:
    """At ends of messages and prompts, where texts branch, and in between; in trees, and chunks that end elsewhere."""
    engines = Engines(target, chunked_prefill_size=23, speculative_algorithm="NGRAM", **TREE)
    system, begin = [*text(17), END], text(3)
    assert engines.cached([*system, *text(7), END, *begin]) == [0]
    turn = [*system, *text(10), END, *begin]
    (answer,) = engines.answers(turn)
    assert answer.cached_tokens == 16, "the message, in whole pages"
    turn += [*answer.tokens, END, *text(11), END, *begin]
    assert engines.cached(turn, turn) == [36, 52], "the answer; the other of a fork"
    assert engines.cached(turn) == [52]
    uncut = text(46)
    assert [engines.cached(uncut) for _ in range(2)] == [[0], [44]]
    raw, shared = text(62), 52
    assert engines.cached(raw) == [0]
    assert engines.cached(raw) == [60], "all but the last token's page"
    assert [engines.cached([*raw[:shared], *text(9)]) for _ in range(3)] == [[32], [52], [52]]
    assert engines.scheduler.stats().cached_tokens == 16 + 36 + 52 + 52 + 44 + 60 + 32 + 52 + 52
    begin = text(48)
    assert engines.cached(*([*begin, *text(5)] for _ in range(3))) == [0, 48, 48], (
        "who comes first cuts for others"
    )


@pytest.mark.parametrize(("page", "drafted"), [(1, False), (4, True), (16, True)])
def test_answers_are_continued(page: int, drafted: bool, target: Path) -> None:
    """From their last whole page, wherever they end, also on a token in the middle of what a step accepts, and while
    another step runs. In pages of two blocks, unless the second has begun."""
    shape = {"speculative_algorithm": "NGRAM", **TREE} if drafted else {}
    warm = make_scheduler(target, page_size=page, overlap_schedule="on", **shape)
    cold = make_scheduler(target, disable_radix_cache=True)

    def ends(prompts: Sequence[Sequence[int]], tokens: int, stopped: bool) -> list[int]:
        """Answer with drafts that are right, let others go on from the answers, and check the hits. Return where
        answers end."""
        long = SamplingParams(max_tokens=2 * tokens, temperature=0)
        known = [each.tokens for each in answer_all(cold, [(prompt, long) for prompt in prompts])]
        params = [
            SamplingParams(
                max_tokens=2 * tokens if stopped else tokens,
                temperature=0,
                stop_token_ids=each[tokens : tokens + 1] if stopped else [],
                prediction=each if drafted else None,
            )
            for each in known
        ]
        answers = [answer_all(each, zip(prompts, params, strict=True)) for each in (warm, cold)]
        assert [each.tokens for each in answers[0]] == [each.tokens for each in answers[1]]
        texts = [[*prompt, *each.tokens] for prompt, each in zip(prompts, answers[0], strict=True)]
        lasts = [len(each) - 1 for each in texts]
        whole = [last // page * page for last in lasts]
        one = SamplingParams(max_tokens=1, temperature=0)
        nexts = [answer_all(each, [([*text, 5, 7], one) for text in texts]) for each in (warm, cold)]
        assert [each.tokens for each in nexts[0]] == [each.tokens for each in nexts[1]]
        cached = [each.cached_tokens for each in nexts[0]]
        serves = [max(last // 8, 1) == max(first // 8, 1) for last, first in zip(lasts, whole, strict=True)]
        assert list(compress(cached, serves)) == list(compress(whole, serves))
        assert all(serves) == (page < 16)
        return lasts

    prompts = [text(4) * 2 + [3] * extra for extra in range(8)]
    assert len({end % 8 for end in ends(prompts, 11, stopped=False)}) == 8
    ends([[4, *each] for each in prompts], 9, stopped=True)


def test_few_snapshots_and_pages(target: Path) -> None:
    """The snapshot used least recently makes room, and those go whose pages go. Pages without one are computed again,
    and preempted requests go on."""
    engines = Engines(target, max_running_requests=3, max_mamba_cache_size=7)
    first, second, third = (text(22) for _ in range(3))
    assert [engines.cached(each) for each in (first, second, first, third, first, second)] == [
        *([0], [0], [20]),
        *([0], [20], [0]),
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
        client.submit(str(index), [*text(47), END, *text(4)], PARAMS)
        client.iterate()
        found.append(client.scheduler.running[-1].prefilled)
    assert found == [52, 48]
    client.run()


def test_a_chunk_of_many_cuts(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is launched in several iterations."""
    monkeypatch.setattr(scheduler, "MOST_CUTS", 2)
    client = Client(make_scheduler(target, page_size=PAGE, chunked_prefill_size=-1))
    client.submit("", text(170), PARAMS)
    client.iterate()
    assert client.scheduler.running[0].prefilled == 96
    client.run()


@pytest.mark.parametrize("length", [3, 12])
def test_answers_make_room_for_what_follows(length: int, target: Path) -> None:
    """A chat has one snapshot, that of its last answer, or of what was asked, if that is long, and one that it shares
    with another stays."""
    engines = Engines(target, max_running_requests=1, max_mamba_cache_size=1 + 3)
    system = [*text(15), END]
    chats = [[*system, *text(3)] for _ in range(2)]
    assert [engines.cached(chat) for chat in chats] == [[0], [16]]
    for _ in range(2):
        for chat in chats:
            chat += [*engines.answers(chat)[0].tokens, END, *text(length - 1), END, *text(3)]
            assert engines.cached(chat) == [(len(chat) - length - 5) // PAGE * PAGE]
    assert [engines.cached([*system, *text(3)]) for _ in range(2)] == [[16], [16]]


@pytest.mark.parametrize("length", [22, 170])
def test_prompts_that_come_again(length: int, target: Path) -> None:
    """Their answers, which differ, leave them the snapshots at their ends. A chat's last answer does not, though what
    is said next is shorter than a page."""
    engines = Engines(target, max_running_requests=1, max_mamba_cache_size=1 + 6)
    prompts, whole = [text(length) for _ in range(2)], length // PAGE * PAGE
    assert [engines.cached(prompt, tokens=1) for prompt in prompts] == [[0], [0]]
    for tokens in range(8, 33, 6):
        assert [engines.cached(prompt, tokens=tokens) for prompt in prompts] == [[whole]] * 2
    engines = Engines(target, page_size=8, max_running_requests=1, max_mamba_cache_size=1 + 4)
    other, chat = text(20), text(18)
    engines.answers(other)
    for _ in range(5):
        chat += [*engines.answers(chat, tokens=7)[0].tokens, 3]
    assert engines.cached(other) == [16]


def test_long_prompts_leave_chats_their_ends(target: Path) -> None:
    """What prompts keep on the way makes room first, but for the last of it, which serves texts that leave them."""
    engines = Engines(target, max_running_requests=1, max_mamba_cache_size=1 + 16)
    chats = [[*text(139), END, *text(3)] for _ in range(5)]
    first = [*chats[-1][:130], *text(8)]
    for chat in chats:
        chat += [*engines.answers(chat)[0].tokens, END, *text(11), END, *text(3)]
    assert engines.cached(first) == [128]
    assert [engines.cached(chat) for chat in chats] == [[148]] * 5


def test_long_prompts_that_nobody_comes_back_to(target: Path) -> None:
    """They leave their room to eight chats, which take all of it."""
    engines = Engines(target, max_running_requests=1, max_mamba_cache_size=1 + 16)
    chats = [text(21) for _ in range(8)]
    for prompt in (text(170), text(170), *chats):
        engines.cached(prompt)
    for chat in chats:
        chat += [*engines.known[8, -1, *chat][:8], END, *text(5)]
    assert all(engines.cached(chat) > [0] for chat in chats)


@pytest.mark.parametrize(("room", "others", "calls"), [(4, 0, True), (4, 1, False), (8, 3, False)])
def test_answers_that_prompts_leave(room: int, others: int, calls: bool, target: Path) -> None:
    """Where templates strip thoughts, a chat has one snapshot, that of what was asked last, and another while it goes
    on from answers that call tools. Those of answers are kept while there is room."""
    engines = Engines(target, max_running_requests=1, max_mamba_cache_size=1 + room)
    chats = [[*text(11), END, *text(3)] for _ in range(2)]
    for turn in range(5):
        for chat in chats:
            asked, (answer,) = len(chat) - 3, engines.answers(chat)
            assert turn < 2 or answer.cached_tokens == asked - 20
            if calls and turn == 3:
                engines.answers([*chat, *answer.tokens, *text(11), END, *text(3)])
            leaves = 3 + (answer.tokens[0] == 3)  # with its first token
            chat += [leaves, *text(3), END, *text(11), END, *text(3)]
        for _ in range(others if turn == 1 else 0):
            engines.answers(text(20))


def test_preempted_answers_are_continued(target: Path) -> None:
    """By their request; aborted ones, whose states may be ahead of what is known, only from their prompts."""
    engines, prompt = Engines(target), text(20)
    client, kept = Client(engines.scheduler), []
    client.submit("preempted", prompt, PARAMS)
    while len(client.answers["preempted"].tokens) < 7:
        client.iterate()
    engines.scheduler.preempt(engines.scheduler.running[0])
    engines.scheduler.admit()
    assert [request.prefilled for request in engines.scheduler.running] == [24]
    assert client.run()["preempted"].tokens == engines.answers(prompt)[0].tokens
    client.submit("aborted", text(20), PARAMS)
    while not client.answers["aborted"].tokens:
        client.iterate()
        kept.append(engines.scheduler.stats().snapshots_kept)
    engines.scheduler.abort("aborted")
    assert engines.scheduler.stats().snapshots_kept == kept[-1]


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
    follower = Executor(context_of(second))
    for message in recorder.sent:
        follower.run(decode(message))
    for part in ("states", "snapshots"):
        kept, other = (getattr(context_of(each), part).kept for each in (first, second))
        assert all(map(torch.equal, kept, other))
        assert kept.key_REJD.any()


def test_by_default_states_take_half_of_what_weights_leave(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_qwen3_5(tmp_path, state_size=16)
    given = make_settings(model_path=str(path), skip_tokenizer_init=True, mem_fraction_static=0.5)
    alone = resolve_engine(replace(given, max_running_requests=1), has_gpu=True)[2]
    context = create_shapes(alone)
    assert context.states is not None
    weights, state = count_bytes([context.target], set()), context.states.nbytes // 2

    def requests(states: int) -> int:
        memory = DeviceMemory(*[2 * (weights + 2 * states * state)] * 2)
        return resolve_engine(given, has_gpu=True, there=memory)[2].max_running_requests

    assert [requests(states) for states in (0, 4, 9, 31, 300)] == [1, 3, 8, 24, 256]
    caplog.set_level("INFO")
    given = replace(given, kv_cache_dtype="fp8_e4m3")
    given = replace(given, max_mamba_cache_size=9, disable_radix_cache=True)  # which leaves it no effect
    assert requests(31) == 24
    assert "max_running_requests = 24" in caplog.text
    assert "FP8 KV cache" not in caplog.text, "said when it is loaded"


def test_settings(target: Path) -> None:
    def notes(**given: Any) -> str:
        settings = make_settings(model_path=str(target), skip_tokenizer_init=True, **given)
        return "\n".join(resolve_engine(settings)[1])

    words = "--max-mamba-cache-size: expected more than the 16 states of --max-running-requests, found 16"
    with pytest.raises(ValueError, match=words):
        notes(max_mamba_cache_size=16, max_running_requests=16)
    assert "max_running_requests = 8: half of max_mamba_cache_size" in notes(max_mamba_cache_size=16)
    assert "mamba_ssm_dtype = float32: the dtype is bfloat16" in notes(dtype="bfloat16")
    with pytest.raises(
        ValueError, match="--page-size: must be a divisor of linear_conv_kernel_dim, 5, or at least"
    ):
        states.States([DeltaState(1, 1, 16, 16, width=5)], 2, torch.float32, torch.device("cpu"), page_size=2)
    given = {"mamba_full_memory_ratio": 0.9, "disable_radix_cache": True}
    assert "--mamba-full-memory-ratio has no effect: no prefix is cached" in notes(**given)
    words = "--disable-hybrid-kv-cache-manager has no effect: no layer has a sliding window"
    assert words in notes(disable_hybrid_kv_cache_manager=True)
    small, large = (make_scheduler(target, mamba_full_memory_ratio=ratio).info.states for ratio in (0.1, 0.5))
    assert 4 * small["prefixes"] < large["prefixes"]
    assert small["memory_bytes"] < large["memory_bytes"]
    most = make_scheduler(target, mamba_full_memory_ratio=1e9, max_total_tokens=None)
    assert most.memory.allocator.capacity == 65536 // 16, "one at each page's end takes no more"
    assert most.info.states["prefixes"] == 65536 // 16 + 1
