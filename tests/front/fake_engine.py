"""A scheduler without a model. Engine processes of tests import it, so it imports little."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from specserve.config import Settings, resolve_paths
from specserve.core import SpeculationUsage, TokenLogprob
from specserve.messages import EngineInfo, Failed, Stats, Submit, Tokens
from specserve.process import phase
from specserve.process.worker import Built

CONTEXT = 256
EOS = 256
VOCAB = 260
NO_GRAMMARS: str | None = None  # why requests can't use grammars


class FakeEngine:
    """Answer with the tokens of ``reply``, ``stride`` per message; end on EOS, ``max_tokens`` and the context."""

    def __init__(self, reply: Callable[[Submit], list[int]], stride: int = 3) -> None:
        self.info = EngineInfo(
            no_grammars=NO_GRAMMARS,
            context_length=CONTEXT,
            max_total_tokens=max(4096, CONTEXT),
            num_pages=16,
            page_size=16,
            kv_pool={},
            states={},
            vocab_size=VOCAB,
            eos_token_ids=[EOS],
            request_defaults={},
            system_fingerprint="fp_0123456789abcdef",
            speculation=None,
            cuda_graphs={},
            ranks=[],
        )
        self.submitted: list[Submit] = []
        self.aborted: list[str] = []
        self.closed = False
        self.reply = reply
        self._stride = stride
        self._left: dict[str, deque[int]] = {}
        self._steps: dict[str, int] = {}
        self._by_rid: dict[str, Submit] = {}
        self._outbox: list[Tokens | Failed] = []

    @property
    def has_work(self) -> bool:
        return bool(self._left or self._outbox)

    @property
    def patience(self) -> float:
        return 0.0

    def submit(self, message: Submit) -> None:
        self.submitted.append(message)
        if message.params.seed == 13:
            self._outbox.append(Failed(message.rid, "seed 13 is unlucky", "seed"))
            return
        if message.params.seed == 14:
            raise RuntimeError("the fake engine died of seed 14")
        self._by_rid[message.rid] = message
        self._left[message.rid] = deque(self._cut(message))
        self._steps[message.rid] = 0

    def abort(self, rid: str) -> None:
        self.aborted.append(rid)
        self._left.pop(rid, None)

    def flush_cache(self) -> int | None:
        return None if self._left else 5

    followed = False

    def check_idle(self) -> None:
        pass

    def work_ahead(self) -> bool:
        return False

    def run_once(self) -> list[Tokens | Failed]:
        out, self._outbox = self._outbox, []
        for rid in list(self._left):
            out.append(self.step(rid))
        return out

    def stats(self) -> Stats:
        return Stats(len(self._left), 0, 100, 75, 5, 7, 8, 9, 10, 11, 12, 13)

    def close(self) -> None:
        self.closed = True

    def _cut(self, message: Submit) -> list[int]:
        """The reply up to the request's end; empty never."""
        params, tokens = message.params, self.reply(message)
        room = CONTEXT - len(message.token_ids)
        return tokens[: room if params.max_tokens is None else min(room, params.max_tokens)]

    def step(self, rid: str) -> Tokens:
        message, left = self._by_rid[rid], self._left[rid]
        tokens: list[int] = []
        stops = {*message.params.stop_token_ids, *(() if message.params.ignore_eos else (EOS,))}
        stopped = False
        while left and len(tokens) < self._stride and not stopped:
            tokens.append(left.popleft())
            stopped = tokens[-1] in stops
        reason = "stop" if stopped else None if left else "length"
        if reason:
            del self._left[rid]
        self._steps[rid] += 1
        steps = self._steps[rid]
        top, scored = message.params.logprobs, message.params.prompt_logprobs
        return Tokens(
            rid=rid,
            token_ids=tokens,
            runs=[len(tokens)] if tokens else [],
            finish_reason=reason,
            stop_token=stopped,
            logprobs=None if top is None else [_logprob(token, top) for token in tokens],
            prompt_logprobs=(
                None
                if scored is None or steps > 1
                else [_logprob(token, scored) for token in message.token_ids[1:]]
            ),
            cached_tokens=4,
            speculation=SpeculationUsage(
                steps=steps, drafted=4 * steps, accepted=(self._stride - 1) * (steps - 1) + len(tokens) - 1
            ),
        )


def _logprob(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, [(token, -0.5), (65, -float("inf")), (66, -3.0)][:top])


def text_reply(text: str, end: bool = True) -> Callable[[Submit], list[int]]:
    return lambda _: [*text.encode(), *([EOS] if end else [])]


def build_echo(settings: Settings) -> Built:
    """What an engine process builds in tests: it repeats the prompt, without end."""
    engine = FakeEngine(lambda message: message.token_ids * 100, stride=2)
    resolved = replace(resolve_paths(settings)[0], context_length=CONTEXT)
    return Built(engine, resolved, ["context_length = 256: the fake's"])


def build_slow(settings: Settings) -> Built:
    """Like ``build_echo``, a message every 20 ms."""
    built = build_echo(settings)
    run_once = built.engine.run_once

    def slowly() -> list[Tokens | Failed]:
        time.sleep(0.02)
        return run_once()

    built.engine.run_once = slowly  # type: ignore[method-assign]
    return built


def build_for_ever(settings: Settings) -> Built:
    """Says that it has begun, and never ends."""
    phase.enter("building for ever")
    print("building", file=sys.stderr, flush=True)
    threading.Event().wait()
    raise AssertionError


def build_told_twice(settings: Settings) -> Built:
    """Like ``build_echo``, in a process that is told to end once more at its very end."""
    atexit.register(signal.raise_signal, signal.SIGTERM)
    return build_echo(settings)


def build_once(settings: Settings) -> Built:
    """Like ``build_slow`` the first time; fails from then on."""
    assert settings.model_path is not None
    (Path(settings.model_path) / "built").touch(exist_ok=False)
    return build_slow(settings)


def build_wrong(settings: Settings) -> Built:
    """A user's mistake."""
    raise ValueError("--page-size: must be nicer")


def build_crash(settings: Settings) -> Built:
    raise RuntimeError("no luck at all")
