"""A request as the scheduler sees it, which ``Scheduler`` changes, and what a launch's results mean for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from specserve.core import SamplingParams, SpeculationUsage, TokenLogprob
from specserve.engine.launch import Emitted
from specserve.kv.radix import Key
from specserve.messages import FinishReason, Tokens
from specserve.speculation.control.acceptance import RequestEffect, StepOutcome
from specserve.speculation.state import PageRun, RowInit


@dataclass(slots=True)
class Hold:
    """A request's pages of one table: ``pages`` are its entries from ``start`` on."""

    start: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.pages)


@dataclass(slots=True, eq=False)
class Request:
    """``limit``: most tokens, prompt included. ``stop_ids`` end it, after at least ``min_tokens`` output tokens.
    ``tenant`` and ``salt``: as in ``Submit``."""

    rid: str
    prompt: Sequence[int]
    params: SamplingParams
    choice: int
    seed: int
    limit: int
    stop_ids: frozenset[int]
    arrival: int
    effect: RequestEffect
    submitted: float  # when it came, before its grammar was compiled
    tenant: str = ""
    salt: str = ""
    keys: list[Key] = field(default_factory=list)  # of its first pages, as the prefix cache has them
    output: list[int] = field(default_factory=list)
    # While it has a slot; reset by preemption.
    slot: int = -1
    holds: list[Hold] = field(default_factory=list)  # by table
    begun: bool = False  # its first chunk is launched, and its row on the device written
    context: Sequence[int] = ()  # tokens to prefill: prompt, and output so far after a preemption
    prefilled: int = 0  # tokens of the context that are launched or cached
    waits: int = 0  # times that it waited because launches compute a part of its prompt
    awaited: tuple[Request, int] | None = None  # whose prompt, and up to which token
    remembered: int = 0  # whole pages offered to the prefix cache
    known: int = 0  # tokens of the context that the prefix cache has, with or without a snapshot
    state: int = 0  # the snapshot from which it continues; 0: none, or copied already
    points: dict[int, bool] = field(default_factory=dict)  # where its prompt is cut, some only passed
    inflight: int = 0  # most tokens that launches not yet read may add to the cache
    pending: int = 0  # launches not yet read that emit at least one token each
    consumed: int = 0  # output tokens that its constraint has consumed
    failures: int = 0  # smallest possible launches of it alone that ran out of device memory
    # For the report.
    predicted: set[int] = field(default_factory=set)  # indices of emitted tokens in its prediction
    queued: float | None = None  # seconds before its first slot
    cached_tokens: int | None = None
    # Of the prompt's tokens but the first; None: not requested, or sent already.
    scores: list[TokenLogprob] | None = None
    usage: SpeculationUsage = field(default_factory=SpeculationUsage)

    def leave_slot(self) -> None:
        self.slot, self.inflight, self.pending = -1, 0, 0
        self.begun, self.context, self.points = False, (), {}
        self.waits, self.awaited = 0, None

    def extend(self, tokens: list[int], predicted: range, from_step: bool) -> None:
        """Append tokens, of which ``predicted`` matched those indices of its prediction."""
        self.output += tokens
        if predicted and self.params.prediction:
            known = len(self.predicted)
            self.predicted.update(predicted[: len(tokens)])
            self.count(predicted=len(self.predicted) - known)
        if from_step:
            self.count(accepted=len(tokens) - 1)

    def count(self, **more: int) -> None:
        """Add to the report's numbers."""
        sums = {name: getattr(self.usage, name) + number for name, number in more.items()}
        self.usage = msgspec.structs.replace(self.usage, **sums)

    @property
    def rank(self) -> tuple[int, int]:
        """The order of service, lowest first."""
        return self.params.priority, self.arrival

    @property
    def prefilling(self) -> bool:
        return self.prefilled < len(self.context)

    @property
    def wants_tokens(self) -> bool:
        """Whether it may still need a token after everything in flight has run."""
        return len(self.prompt) + len(self.output) + self.pending < self.limit

    @property
    def may_have_ended(self) -> bool:
        """Whether what is in flight brings it to its limit if all drafts are accepted."""
        return self.computed + 1 + self.inflight >= self.limit

    @property
    def room(self) -> int:
        """Tokens that a step may give it beyond the first: the most draft levels that are useful."""
        return self.limit - len(self.prompt) - len(self.output) - self.pending - 1

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]

    @property
    def unconsumed(self) -> Sequence[int]:
        """Tokens that its constraint has not seen yet; none if it is not constrained."""
        return self.output[self.consumed :] if self.params.constrained else ()

    @property
    def reusable(self) -> int:
        """Tokens that a cached prefix may cover. For a scored prompt, those whose successors have been scored."""
        return len(self.prompt) + len(self.output) if self.scores is None else len(self.scores) + 1

    @property
    def pages(self) -> list[PageRun]:
        """All its pages, as the device is told."""
        return [(self.slot, table, hold.start, hold.pages) for table, hold in enumerate(self.holds)]

    @property
    def computed(self) -> int:
        """Tokens that are certainly in the cache, by the results read so far."""
        known = len(self.prompt) + len(self.output) - 1
        return self.prefilled if self.prefilling or known < len(self.context) else known


def row_init(request: Request, cached: int, page_size: int) -> RowInit:
    """Return what the device is told of a request that takes a slot with ``cached`` tokens of its prefix."""
    first = request.holds[0]
    return RowInit(
        slot=request.slot,
        pages=request.pages,
        params=request.params,
        seed=request.seed,
        choice=request.choice,
        prompt=request.prompt,
        output=request.output,
        limit=request.limit,
        stop_ids=sorted(request.stop_ids),
        banned_until=len(request.prompt) + request.params.min_tokens,
        cached=cached,
        last_cached_page=first.pages[cached // page_size - 1 - first.start] if cached else 0,
    )


def until_end(request: Request, tokens: list[int]) -> tuple[list[int], FinishReason | None, bool]:
    """Return the tokens up to the end of the request, why it ends there, and whether on a stop token."""
    have = len(request.prompt) + len(request.output)
    for index, token in enumerate(tokens):
        if have + index >= request.limit:
            return tokens[:index], "length", False  # the request has no room for it
        if token in request.stop_ids:
            return tokens[: index + 1], "stop", True
        if have + index + 1 >= request.limit:
            return tokens[: index + 1], "length", False
    return tokens, None, False


def message_of(
    request: Request, emitted: Emitted, kept: list[int], reason: FinishReason | None, stopped: bool
) -> Tokens:
    """Return the message with the tokens that are ``kept`` of an emission."""
    return Tokens(
        rid=request.rid,
        token_ids=kept,
        runs=[len(kept)] if kept else [],
        finish_reason=reason,
        stop_token=stopped,
        logprobs=None if emitted.logprobs is None else emitted.logprobs[: len(kept)],
        prompt_logprobs=request.scores,
        cached_tokens=request.cached_tokens or 0,
        speculation=request.usage,
        queued=request.queued or 0.0,
    )


def outcome_of(requests: Sequence[Request], found: Sequence[Emitted], kept: int, stopped: int) -> StepOutcome:
    """Return what a step gave. ``kept``: tokens of all requests up to their ends; ``stopped``: ends by a stop token."""
    return StepOutcome(
        emitted=[len(each.tokens) for each in found],
        drafted=[each.drafted for each in found],
        chains=[each.chain for each in found],
        firsts=[each.firsts for each in found],
        guided={i for i, r in enumerate(requests) if r.effect.predicted and found[i].predicted.start >= 0},
        kept=kept,
        stopped=stopped,
    )
