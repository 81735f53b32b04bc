"""From a submission to a request that may begin: its check, the compilation of its grammar, and the queue."""

from __future__ import annotations

import itertools
import random
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from operator import attrgetter

from specserve.core import MAX_SEED, Capacity, FieldError
from specserve.messages import Failed, Submit
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
            salt=message.salt,
            scores=None if params.prompt_logprobs is None else [],
        )


class Waiting:
    """Requests without a slot, by rank, lowest first. Those whose grammars are being compiled come first of all, are
    not counted by ``len``, and delay no other. Adding and removing only move references."""

    def __init__(self, admission: Admission, compile: Callable[[str], Future[object] | None]) -> None:
        """``compile``: as ``Runner.compile``."""
        self._admission = admission
        self._compile = compile
        # By id, each with the time it came.
        self._compiling: dict[str, tuple[Submit, float, Future[object]]] = {}
        self._by_id: dict[str, Request] = {}
        self._ranked: list[Request] = []

    def __len__(self) -> int:
        return len(self._ranked)

    @property
    def compiling(self) -> int:
        return len(self._compiling)

    @property
    def head(self) -> Request:
        return self._ranked[0]

    def submit(self, message: Submit) -> Failed | None:
        """Queue a request, or begin to compile its grammar. Return a refusal."""
        grammar, now = message.params.grammar, time.monotonic()
        if grammar is not None and (compilation := self._compile(grammar)) is not None:
            self._compiling[message.rid] = message, now, compilation
            return None
        return self._admit(message, now)

    def poll(self, idle: bool) -> list[Failed]:
        """Queue the requests whose compilation has ended. Return refusals. ``idle``: wait a while for one."""
        if idle and self._compiling:
            wait([compilation for *_, compilation in self._compiling.values()], WAIT, FIRST_COMPLETED)
        done = [rid for rid, (*_, compilation) in self._compiling.items() if compilation.done()]
        failed = [
            self._admit(message, came)
            if (error := compilation.exception()) is None
            else Failed(message.rid, str(error), "grammar")
            for message, came, compilation in map(self._compiling.pop, done)
        ]
        return [each for each in failed if each is not None]

    def _admit(self, message: Submit, submitted: float) -> Failed | None:
        try:
            self.add(self._admission.admit(message, submitted))
        except FieldError as refused:
            return Failed(message.rid, refused.reason, refused.param)
        return None

    def add(self, request: Request) -> None:
        self._by_id[request.rid] = request
        insort(self._ranked, request, key=_RANK)

    def take(self, rid: str) -> Request | None:
        """Remove and return a queued request; None if it is not in the queue."""
        request = self._by_id.pop(rid, None)
        if request is not None:
            del self._ranked[bisect_left(self._ranked, request.rank, key=_RANK)]
        return request

    def drop(self, rid: str) -> bool:
        """Forget a request. Return whether it was here."""
        return self._compiling.pop(rid, None) is not None or self.take(rid) is not None

    def clear(self) -> None:
        for each in (self._compiling, self._by_id, self._ranked):
            each.clear()
