"""Engines on several ranks say what one process says. Ranks are threads, but for a few tests of processes."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from socket import socket, socketpair
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from specserve import LLM, SamplingParams, grammar
from specserve.config import make_settings
from specserve.config.engine import EngineConfig
from specserve.layers.embedding import SharedHead
from specserve.methods import NONE
from specserve.models.checkpoint import load_target
from specserve.models.draft.token_map import SharedRows
from specserve.process import followers, link, spares, worker
from specserve.process.assemble import create_scheduler, resolve_engine
from specserve.process.follower import follow
from specserve.process.followers import Followers, Job, put, take
from specserve.process.peers import TICK, RankGone, in_time
from specserve.process.spares import Spares, is_stopped, start_process
from specserve.speculation.drafters.eagle import EagleDrafter
from tests.engines import Answer, Checkpoints, Client, answer_all, context_of, head_of, make_scheduler
from tests.front.processes import wait
from tests.ranks import FOLLOWER, ranks_in_threads
from tests.test_ranks import dummy

LONG = [3, 5, 7, 9] * 7
WORK = [
    (LONG, SamplingParams(max_tokens=24, temperature=0, logprobs=3)),
    (LONG[:20], SamplingParams(max_tokens=30, seed=1, prediction=[4, 4, 8, 8] * 4, top_p=0.9, min_p=0.01)),
    ([8], SamplingParams(max_tokens=12, seed=2, frequency_penalty=0.5, logit_bias={4: 2.0}, top_k=20)),
    ([2, 2, 6], SamplingParams(max_tokens=9, seed=3, min_tokens=3, prompt_logprobs=2)),
]
SETTINGS: dict[str, Any] = {"page_size": 4, "max_total_tokens": 64, "chunked_prefill_size": 16}
SHAPE = 3, 2, 6
SHAPES = "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"
METHODS = (
    *("DOMINO", "STANDALONE", "P_EAGLE", "EAGLE3+NGRAM", "MEDUSA", "HYDRA", "REDRAFTER", "MLP_SPECULATOR"),
    *("ARCTIC_LSTM", "PARD", "DFLASH", "NGRAM", "SUFFIX", "LOOKAHEAD"),
)
WINDOW = {f"speculative_lookahead_{name}": 3 for name in ("window", "ngram", "guesses")}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with ranks_in_threads(torch.float64):
        yield


@pytest.fixture(scope="module")
def expected(agreeing: Checkpoints) -> list[Answer]:
    """The answers of one process without drafts."""
    return answer_all(make_scheduler(agreeing.target, **SETTINGS), WORK)


def assert_same(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.tokens, ours.finish_reason) == (theirs.tokens, theirs.finish_reason)
        for mine, other in zip(
            (*ours.logprobs, *ours.scores), (*theirs.logprobs, *theirs.scores), strict=True
        ):
            assert mine.token_id == other.token_id
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-9)
            assert [token for token, _ in mine.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("method", [NONE, *METHODS])
def test_every_method_on_two_ranks(method: str, agreeing: Checkpoints, expected: list[Answer]) -> None:
    """With sampling, penalties, log-probabilities and predictions, while requests are preempted."""
    given = SETTINGS if method == NONE else SETTINGS | agreeing.drafting(method, SHAPE)
    if method == "LOOKAHEAD":
        given = SETTINGS | agreeing.drafting(method) | WINDOW | {"speculative_adaptive": False}
    with closing(make_scheduler(agreeing.target, tensor_parallel_size=2, **given)) as scheduler:
        found = answer_all(scheduler, WORK)
        assert scheduler.stats().preemptions > 0
    assert_same(found, expected)
    assert any(each.usage.accepted for each in found) == (method != NONE)


@pytest.mark.parametrize("method", ["EAGLE", "EAGLE3", "P_EAGLE", "DSPARK", "DFLASH2"])
def test_drafts_that_are_shared_out(
    method: str,
    agreeing: Checkpoints,
    expected: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They say what whole ones do. EAGLE has a map of the target's head."""
    monkeypatch.setattr("specserve.models.draft.load.EXCHANGE", 0)
    given = {**SETTINGS, "max_total_tokens": 256} | agreeing.drafting(method, SHAPE)
    if method == "EAGLE":
        (tmp_path / "map.json").write_text(json.dumps([*range(0, 45, 2), *range(45, 60)]))
        given["speculative_token_map"] = str(tmp_path / "map.json")
    accepted, kept = [], []
    for ranks in (1, 2):
        with closing(make_scheduler(agreeing.target, tensor_parallel_size=ranks, **given)) as scheduler:
            found = answer_all(scheduler, WORK)
            if "EAGLE" in method:
                assert isinstance(head_of(scheduler).reader, SharedHead) == (ranks == 2)
            kept.append(context_of(scheduler).pool.config.draft[0].token_bytes)
        assert_same(found, expected)
        accepted.append([each.usage.accepted for each in found])
    assert kept[0] == 2 * kept[1]
    assert accepted[0] == accepted[1]
    assert any(accepted[0])


@pytest.mark.parametrize("family", ["gpt-oss", "deepseek v3", "deepseek v2 lite", "qwen3 next"])
def test_sinks_biases_of_experts_latents_and_states(family: str, tmp_path: Path) -> None:
    path = dummy(tmp_path, family, max_position_embeddings=64)
    settings: dict[str, Any] = {"load_format": "dummy", "page_size": 4}
    expected = answer_all(make_scheduler(path, **settings), WORK)
    own = "NEXTN" if family in ("deepseek v3", "qwen3 next") else "NGRAM"
    tree = {"speculative_algorithm": own, **dict(zip(SHAPES, SHAPE, strict=True))}
    with closing(make_scheduler(path, tensor_parallel_size=2, **settings, **tree)) as scheduler:
        assert_same(answer_all(scheduler, WORK), expected)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_map_that_follows_the_text_a_controller_and_four_ranks(
    on_gpu: bool, agreeing: Checkpoints, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More ranks than KV heads, which are then on two. On a GPU each has a part of the map's rows."""
    monkeypatch.setattr("specserve.models.draft.token_map.on_gpu", lambda _: on_gpu)
    dynamic: dict[str, Any] = {
        "speculative_token_map": "dynamic",
        "speculative_token_map_size": 16,
        "speculative_token_map_interval": 1,
    }
    given = SETTINGS | agreeing.drafting("EAGLE") | dynamic
    with closing(make_scheduler(agreeing.target, tensor_parallel_size=4, **given)) as scheduler:
        found = answer_all(scheduler, WORK)
        assert scheduler.policy.cost is not None
        read, drafter = head_of(scheduler).reader, context_of(scheduler).drafter
    assert_same(found, expected)
    if on_gpu:
        assert isinstance(read, SharedRows)
        assert isinstance(drafter, EagleDrafter)
        assert drafter.vocab is not None
        own = read._rows.own.rows(None)[0]  # private: whose rows they are is not to be seen in texts
        whole = load_target(agreeing.target, torch.float64, torch.device("cpu")).lm_head
        assert torch.equal(own, whole.rows(drafter.vocab.ids[: len(own)])[0])
        assert drafter.vocab.ids.tolist() != list(range(16))


def test_cached_prefixes_and_aborted_requests(agreeing: Checkpoints, expected: list[Answer]) -> None:
    settings = {**SETTINGS, "max_total_tokens": 256}
    given = settings | agreeing.drafting("EAGLE3", SHAPE)
    with closing(make_scheduler(agreeing.target, tensor_parallel_size=2, **given)) as scheduler:
        client = Client(scheduler)
        for number, (prompt, params) in enumerate(WORK):
            client.submit(f"aborted {number}", prompt, params)
        for _ in range(4):
            client.iterate()
        for number in range(len(WORK)):
            scheduler.abort(f"aborted {number}")
        found = answer_all(scheduler, WORK)
        scheduler.check_idle()
        assert scheduler.stats().violations == 0
    assert found[0].cached_tokens > 0
    assert_same(found, expected)


def test_grammars(small_chat: Checkpoints) -> None:
    """Rank 0 alone follows them; their masks and forced text are commands."""
    form = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
    params = [
        SamplingParams(
            seed=0, max_tokens=24, grammar=grammar.json_schema({**form, "additionalProperties": False})
        ),
        SamplingParams(temperature=0, max_tokens=24, grammar=grammar.choice(["maybe not", "certainly"])),
        SamplingParams(seed=1, max_tokens=12),
    ]
    texts = []
    for ranks in (1, 2):
        settings = small_chat.drafting("EAGLE3", SHAPE) | {"dtype": "float64", "context_length": 128}
        with LLM(str(small_chat.target), cpu_threads=1, tensor_parallel_size=ranks, **settings) as llm:
            texts.append([each.text for each in llm.generate(["User: one."] * 3, params)])
    assert texts[0] == texts[1]
    assert isinstance(json.loads(texts[0][0])["a"], int)
    assert texts[0][1] in ("maybe not", "certainly")


def run_failing(part: str, error: Exception) -> Any:
    """A rank other than 0 fails there."""
    return patch(f"specserve.process.follower.{part}", side_effect=error)


def test_an_error_of_a_rank_is_told_with_its_number(
    agreeing: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one that serves none is a user's mistake."""
    scheduler = make_scheduler(agreeing.target, tensor_parallel_size=2)
    with closing(scheduler), run_failing("decode", ValueError("boom")):
        with pytest.raises(RankGone, match="rank 1: ValueError: boom"):
            answer_all(scheduler, WORK)
        wait(lambda: all(each.name != FOLLOWER for each in threading.enumerate()), 20)
        with pytest.raises(RankGone):
            scheduler.work_ahead()
    assert "rank 1 failed\nTraceback" in caplog.text


def test_a_rank_that_cannot_load_ends_the_start(agreeing: Checkpoints) -> None:
    with (
        run_failing("create_context", ValueError("--dtype: not here")),
        pytest.raises(ValueError, match=r"^--dtype: not"),
    ):
        make_scheduler(agreeing.target, tensor_parallel_size=2)
    with (
        patch("os.cpu_count", return_value=6),
        pytest.raises(
            ValueError, match="--cpu-threads is of each rank: must be at most 3 with 2 ranks, found 4"
        ),
    ):
        make_scheduler(agreeing.target, tensor_parallel_size=2, cpu_threads=4)
    with pytest.raises(
        ValueError, match="--tensor-parallel-size: expected at most 0, the number of GPUs, found 2"
    ):
        create_scheduler(replace(config_of(agreeing), device="cuda"))


def test_a_fork_does_not_keep_ranks(agreeing: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(agreeing.target, tensor_parallel_size=2)
    assert isinstance(scheduler.runner.followers, Followers)
    copy = scheduler.runner.followers._controls[1].dup()  # private: as a process that is forked has it
    timer = threading.Timer(5, copy.close)
    timer.start()
    scheduler.close()
    timer.cancel()
    copy.close()
    assert not caplog.text


def test_an_error_that_rank_0_has_had_is_not_told(agreeing: Checkpoints) -> None:
    control, ours = socketpair()
    put(ours, pickle.dumps(Job(1, config_of(agreeing), {})))
    ours.close()
    with run_failing("create_context", ValueError("--max-total-tokens: too many")):
        assert follow(control, {}) == 1


def config_of(models: Checkpoints) -> EngineConfig:
    given = {"model_path": str(models.target), "skip_tokenizer_init": True, "tensor_parallel_size": 2}
    return resolve_engine(make_settings(**given, device="cpu"))[2]


def test_kernels_do_not_wait_for_a_rank_that_ends_or_hangs(agreeing: Checkpoints) -> None:
    process, stopped = subprocess.Popen(["sleep", "60"]), threading.Event()
    gpu = Mock(late=None, stop=stopped.set)

    given = list[socket]()

    def start(control: socket, peers: Mapping[int, socket]) -> object:
        given.extend((control, *peers.values()))
        return process

    with (
        patch("specserve.process.gpu_peers.cards", return_value=["2", "0"]),
        patch("specserve.process.gpu_peers.GpuPeers", return_value=gpu),
        patch("specserve.process.spares.start_process", start),
    ):
        ranks = Followers(replace(config_of(agreeing), device="cuda"), Spares(2))
    assert pickle.loads(take(given[0]) or b"").environment == {"CUDA_VISIBLE_DEVICES": "0,2"}
    own, other = ranks.places
    assert (own["device"], other) == ("cuda:2", {"device": "cuda:0", "pid": process.pid})
    for each in given:
        each.close()
    gpu.late = 1
    with pytest.raises(RankGone, match="rank 1 does not answer"):
        ranks.check()
    assert not stopped.is_set()
    gpu.late = None
    process.kill()
    assert stopped.wait(20)
    with pytest.raises(RankGone, match="rank 1 ended with code -9"):
        ranks.check()
    ranks.close()
    gpu.close.assert_called_once_with()


class Processes:
    """Starts ranks as processes, and remembers them."""

    def __init__(self) -> None:
        self.found: list[subprocess.Popen[bytes]] = []

    def __call__(self, *sockets: Any) -> Any:
        self.found.append(start_process(*sockets))
        return self.found[-1]


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "ended with code -9"), (signal.SIGSTOP, "not answer")]
)
def test_a_process_that_ends_or_hangs_ends_the_engine(
    number: signal.Signals,
    words: str,
    agreeing: Checkpoints,
    expected: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that ends is noticed while there is nothing to do, one that hangs after a second. None is left. Modules come
    from where this process has them."""
    (tmp_path / "queue.py").write_text("raise ImportError")
    monkeypatch.chdir(tmp_path)
    processes = Processes()
    monkeypatch.setattr(spares, "start_process", processes)
    monkeypatch.setattr(worker, "REST", 0.1)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float64", "skip_tokenizer_init": True}
    settings |= {"max_total_tokens": 256, "dist_timeout": 1}
    with LLM(str(agreeing.target), tensor_parallel_size=2, **settings) as llm:
        (answer,) = llm.generate(LONG, WORK[0][1])
        assert answer.token_ids == expected[0].tokens
        (process,) = processes.found
        assert process.poll() is None
        process.send_signal(number)
        if number == signal.SIGKILL:
            wait(lambda: all(each.name != "specserve-engine" for each in threading.enumerate()), 20)
        with pytest.raises(RuntimeError, match=f"the engine failed: RankGone: rank 1 .*{words}"):
            llm.generate(LONG, WORK[0][1])
    assert process.poll() is not None


def test_what_is_stopped_as_a_group_is_not_late() -> None:
    """Time in which this process did not run is not counted, nor that in which rank 0 was stopped."""
    tries, stopped = [], iter([True, True, False, False])

    def fail() -> int:
        tries.append(1)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        in_time(fail, 2 * TICK, lambda: next(stopped))
    assert len(tries) == 4
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        wait(lambda: is_stopped(process.pid), 20)
        process.kill()


def test_processes_that_nobody_takes_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert followers.GRACE < link.GRACE  # or one that hangs is left by a server that stops
    processes = Processes()
    monkeypatch.setattr(spares, "start_process", processes)
    monkeypatch.setattr(sys, "path", [*sys.path, Path("ignored")])  # as imports ignore it
    with Spares(2):
        pass
    (process,) = processes.found
    assert process.poll() == -signal.SIGKILL
