"""From a submission to a request that may begin: its check, the compilation of its grammar, and the queue."""

from __future__ import annotations

import itertools
import random
import time
from bisect import bisect_left, insort
from concurrent.futures import FIRST_COMPLETED, Future, wait
from operator import attrgetter

from specserve.core import MAX_SEED, Capacity, FieldError
from specserve.messages import Submit
from specserve.scheduler.request import Request
from specserve.speculation.control.acceptance import RequestEffect
from specserve.speculation.state import draft_cap

_RANK = attrgetter("rank")
WAIT = 0.005  # seconds for which an idle engine waits for a grammar at a time


class Admission:
    """Turn a submission into a request with an arrival number and a seed, or say why it can't be served."""

    def __init__(
        self,
        capacity: Capacity,
        eos_token_ids: tuple[int, ...],
        random_seed: int | None,
        no_grammars: str | None,
    ) -> None:
        """``no_grammars``: why requests can't use grammars; None if they can."""
        self._capacity = capacity
        self._eos_token_ids = eos_token_ids
        self._no_grammars = no_grammars
        self._seeds = random.Random(random_seed)
        self._arrivals = itertools.count()

    def admit(self, message: Submit, submitted: float) -> Request:
        """Return the request, which came at ``submitted``. Raises FieldError if it can't be served."""
        params, prompt = message.params, message.token_ids
        self._capacity.check(prompt, params)
        if params.constrained and self._no_grammars is not None:
            param = "thinking_token_budget" if params.grammar is None else "grammar"
            raise FieldError(param, self._no_grammars)
        if params.thinking_token_budget is not None and params.thought is None:
            raise FieldError(
                "thinking_token_budget", "not supported: the model's reasoning format is unknown"
            )
        room = self._capacity.room
        limit = room if params.max_tokens is None else min(len(prompt) + params.max_tokens, room)
        eos = () if params.ignore_eos else self._eos_token_ids
        stop_ids = frozenset((*eos, *params.stop_token_ids))
        ends = params.thought.end if params.thinking_token_budget is not None and params.thought else ()
        if params.min_tokens and (met := stop_ids.intersection(ends)):
            words = f"token {min(met)} ends both the answer and, at its budget, the thought: it must be 0"
            raise FieldError("min_tokens", f"{words}, found {params.min_tokens}")
        seed = self._seeds.randrange(MAX_SEED) if params.seed is None else params.seed
        return Request(
            rid=message.rid,
            prompt=prompt,
            params=params,
            choice=message.choice,
            seed=seed,
            limit=limit,
            stop_ids=stop_ids,
            arrival=next(self._arrivals),
            effect=RequestEffect.of(draft_cap(params), params),
            submitted=submitted,
            tenant=message.tenant,
            scores=None if params.prompt_logprobs is None else [],
        )


class Compiling:
    """Requests whose grammars are being compiled, each with the time at which it came. Until they join the queue, they
    delay no other."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[Submit, float, Future[object]]] = {}  # by id

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, message: Submit, compilation: Future[object]) -> None:
        self._pending[message.rid] = message, time.monotonic(), compilation

    def drop(self, rid: str) -> bool:
        """Forget a request. Return whether it was here."""
        return self._pending.pop(rid, None) is not None

    def clear(self) -> None:
        self._pending.clear()

    def take(self, idle: bool) -> list[tuple[Submit, float, BaseException | None]]:
        """Take the requests whose compilation has ended, each with its time and its error or None. ``idle``: there is
        nothing else to do, so wait a while for one."""
        if idle and self._pending:
            wait([compilation for *_, compilation in self._pending.values()], WAIT, FIRST_COMPLETED)
        done = [rid for rid, (*_, compilation) in self._pending.items() if compilation.done()]
        return [(message, came, each.exception()) for message, came, each in map(self._pending.pop, done)]


class Queue:
    """Waiting requests by id and by rank, lowest first. Adding and removing only move references."""

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self._ranked: list[Request] = []

    def __len__(self) -> int:
        return len(self._ranked)

    @property
    def head(self) -> Request:
        return self._ranked[0]

    def add(self, request: Request) -> None:
        self._by_id[request.rid] = request
        insort(self._ranked, request, key=_RANK)

    def take(self, rid: str) -> Request | None:
        """Remove and return a request; None if it is not waiting."""
        request = self._by_id.pop(rid, None)
        if request is not None:
            del self._ranked[bisect_left(self._ranked, request.rank, key=_RANK)]
        return request

    def clear(self) -> None:
        self._by_id.clear()
        self._ranked.clear()
