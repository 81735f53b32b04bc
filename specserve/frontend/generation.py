"""Run the requests of one call together: stream their tokens and collect their answers."""

from __future__ import annotations

import itertools
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from specserve.core import SamplingParams
from specserve.frontend.answers import AnswerParser
from specserve.frontend.output import Answer, Delta, output_processor
from specserve.frontend.tokenizer import Tokenizer
from specserve.messages import Failed, Submit, Tokens
from specserve.process.client import EngineClient, Inbox

_CALLS = itertools.count()


class TokenStatistics:
    """Counts generated tokens by id since the start, without their order or user, for ``--token-statistics``."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def count(self, token_ids: Iterable[int]) -> None:
        self._counts.update(token_ids)

    def report(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the number of tokens, and pairs of id and count, most frequent first, lower ids first among equals."""
        counts = sorted(self._counts.items(), key=lambda pair: (-pair[1], pair[0]))
        return self._counts.total(), counts


class RequestFailed(Exception):
    """The engine refused or lost a request."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.param = failed.param
        self.fault = failed.fault


class Clock(Protocol):
    """Receive the durations of requests, in seconds. ``prefill`` starts after the queue, ``decode`` after the first
    token."""

    def queued(self, seconds: float) -> None: ...
    def first_token(self, seconds: float, prefill: float) -> None: ...
    def next_tokens(self, seconds: float, tokens: int) -> None: ...
    def finished(self, seconds: float, decode: float, job: Job, answer: Answer) -> None: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One answer of a call. ``by_token``: its deltas tell which text came with which token. ``parser`` parses its
    text."""

    prompt: Sequence[int]
    params: SamplingParams
    choice: int = 0
    by_token: bool = False
    parser: AnswerParser | None = None


def jobs_of(
    prompt: Sequence[int], params: SamplingParams, parsers: Sequence[AnswerParser | None], by_token: bool
) -> list[Job]:
    """Return the jobs of the answers to a prompt, one with each of ``parsers``. Only the first one scores the
    prompt."""
    unscored = msgspec.structs.replace(params, prompt_logprobs=None)
    return [
        Job(prompt, unscored if choice else params, choice, by_token, parser)
        for choice, parser in enumerate(parsers)
    ]


class Generation:
    """Run the jobs of one call. Call ``start``, read ``deltas`` to their end, and always ``close``.

    ``name``: a common name of the jobs, by default a new one. ``timeout``: seconds after which unfinished jobs are
    aborted. ``tenant`` and ``salt``: as in ``Submit``.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer | None,
        clock: Clock,
        jobs: Sequence[Job],
        statistics: TokenStatistics | None = None,
        *,
        name: str | None = None,
        timeout: float | None = None,
        tenant: str = "",
        salt: str = "",
    ) -> None:
        self.jobs = jobs
        self.name = name or uuid.uuid4().hex
        self._engine = engine
        self._clock = clock
        self._statistics = statistics
        self._timeout = timeout
        self._caller = tenant, salt
        # Not of the name: the engine may yet send tokens of an aborted call whose name this one has.
        call = next(_CALLS)
        self._rids = {f"{call}-{index}": index for index in range(len(jobs))}
        self._outputs = [
            output_processor(tokenizer, job.prompt, job.params, job.parser, job.by_token) for job in jobs
        ]
        self._started = self._first_at = self._last = [0.0] * len(jobs)
        self._queued = 0.0  # seconds, of the first answer that began
        self._inbox: Inbox | None = None
        self._first: Tokens | None = None

    @property
    def answers(self) -> list[Answer]:
        return [output.answer for output in self._outputs]

    @property
    def first_token(self) -> float | None:
        """Seconds from submitting the jobs to their first token; None before it."""
        pairs = zip(self._started, self._first_at, strict=True)
        return min((first - started for started, first in pairs if first > started), default=None)

    @property
    def durations(self) -> dict[str, float]:
        """The call's parts so far in seconds, under vLLM's names; none before the first token."""
        if (first := self.first_token) is None:
            return {}
        total = max(self._last) - min(self._started)
        prefill = max(first - self._queued, 0.0)
        return {
            "e2e": total,
            "time_to_first_token": first,
            "time_in_queue": self._queued,
            "time_in_model_prefill": prefill,
            "time_in_model_decode": total - first,
            "time_in_model_inference": prefill + total - first,
        }

    def submit(self) -> None:
        """Submit the jobs to the engine."""
        self._started = [time.monotonic()] * len(self.jobs)
        self._first_at, self._last = list(self._started), list(self._started)
        requests = [
            Submit(rid, list(job.prompt), job.params, job.choice, *self._caller)
            for rid, job in zip(self._rids, self.jobs, strict=True)
        ]
        self._inbox = self._engine.submit(requests, self.name)
        if self._timeout is not None:
            self._inbox.expire_in(self._timeout)

    async def start(self) -> None:
        """Submit the jobs, if not done yet, and wait for the first tokens. Raises RequestFailed."""
        if self._inbox is None:
            self.submit()
        self._first = await self._get()

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield a job's index and the delta of each message, until all jobs are done. Raises RequestFailed."""
        left, message = len(self.jobs), self._first
        while left:
            message = message or await self._get()
            index = self._rids[message.rid]
            output = self._outputs[index]
            if output.answer.finish_reason is not None:
                message = None
                continue  # sent before the engine learned that a stop string ended the answer
            delta = output.push(message)
            self._measure(index, delta, message.queued)
            if self._statistics is not None:
                self._statistics.count(delta.token_ids)
            if output.must_abort:
                self._engine.abort(message.rid)
            left -= delta.finish_reason is not None
            message = None
            yield index, delta

    async def run(self) -> list[Answer]:
        """Run all jobs and return their answers. Raises RequestFailed."""
        await self.start()
        async for _ in self.deltas():
            pass
        return self.answers

    def close(self) -> None:
        """Abort unfinished jobs."""
        if self._inbox is not None:
            self._inbox.close()

    async def _get(self) -> Tokens:
        """Return the next message. A failure of an answer that a stop string has ended meanwhile is skipped."""
        assert self._inbox is not None
        while isinstance(message := await self._inbox.get(), Failed):
            if self._outputs[self._rids[message.rid]].answer.finish_reason is None:
                raise RequestFailed(message)
        return message

    def _measure(self, index: int, delta: Delta, queued: float) -> None:
        now = time.monotonic()
        if len(self._outputs[index].answer.token_ids) == len(delta.token_ids):
            if self.first_token is None:
                self._queued = queued
            self._first_at[index] = now
            self._clock.queued(queued)
            if delta.token_ids:  # empty if only the prompt was to be scored
                seconds = now - self._started[index]
                self._clock.first_token(seconds, max(seconds - queued, 0.0))
        else:
            self._clock.next_tokens(now - self._last[index], len(delta.token_ids))
        self._last[index] = now
        if delta.finish_reason is not None:
            seconds, decode = now - self._started[index], now - self._first_at[index]
            self._clock.finished(seconds, decode, self.jobs[index], self._outputs[index].answer)
