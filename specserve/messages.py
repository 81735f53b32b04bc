"""What the front process and the engine say to each other: one direction each way, no call-backs.

Front to engine: Submit, Abort, Flush. Engine to front: Starting, Ready, Tokens, Failed, Flushed, Stats, Broken.
Encoded with msgpack, as lists: all that there is to say at a time travels together (docs/decisions).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from specserve.core import SamplingParams, SpeculationUsage, TokenLogprob

FinishReason = Literal["stop", "length"]
Fault = Literal["request", "server", "unavailable", "timeout", "aborted"]


class Submit(msgspec.Struct, tag=True, frozen=True):
    """A new request. ``choice`` tells apart the ``n`` answers of one call; it keys the sampler's noise. ``tenant``
    tells apart who asks: what one was answered is not proposed to another."""

    rid: str
    token_ids: list[int]
    params: SamplingParams
    choice: int = 0
    tenant: str = ""


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Ends a request whose answer nobody waits for; unknown ids are ignored. Answered by nothing."""

    rid: str


class Flush(msgspec.Struct, tag=True, frozen=True):
    """Empties the prefix cache of an idle engine. Answered by Flushed, in order."""


class Flushed(msgspec.Struct, tag=True, frozen=True):
    """How many pages the prefix cache gave back; None: nothing was done, as there are requests."""

    pages: int | None


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """Newly chosen tokens of a request, in order. The last message carries ``finish_reason``.

    ``cached_tokens`` and ``speculation`` are totals so far, in every message: a stop string may end it there.

    ``runs`` splits ``token_ids`` by step: accepted drafts and the bonus token of one target forward each.
    A matched stop token is the last of ``token_ids`` and ``stop_token`` is true. ``prompt_logprobs``: of the prompt's
    tokens but the first, in the first message, if asked for. No tokens: none were asked for. ``queued``: seconds that
    the request waited for its first slot and pages.
    """

    rid: str
    token_ids: list[int]
    runs: list[int]
    finish_reason: FinishReason | None = None
    stop_token: bool = False
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    speculation: SpeculationUsage | None = None
    queued: float = 0.0


def join(first: Tokens, second: Tokens) -> Tokens:
    """Two messages of a request, in their order, as one."""
    logprobs = None if second.logprobs is None else [*(first.logprobs or []), *second.logprobs]
    return msgspec.structs.replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        runs=first.runs + second.runs,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        queued=first.queued,
    )


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The request was refused or lost; it gets no more tokens. ``param`` names the field at fault, if any.

    ``fault``: what is the matter: the request itself, a mistake of ours, no engine to answer it, its time is over, or
    that somebody ended it.
    """

    rid: str
    message: str
    param: str | None = None
    fault: Fault = "request"


class ShapeTotals(msgspec.Struct, frozen=True):
    """Steps of one shape, and the seconds that the device worked on them."""

    steps: int
    seconds: float


class LevelTotals(msgspec.Struct, frozen=True):
    """How often a draft level was tested (all above were accepted, and the request had at least as many drafted nodes
    as the level is deep), and how often the target then chose a token drafted there."""

    tested: int
    accepted: int


class SourceTotals(msgspec.Struct, frozen=True):
    """Of a drafter that shares trees with another: how many of its first choices were compared with the text, as far
    as the text followed them and whether they were verified or not; how many of these were right; and how many accepted
    tokens it had among its candidates, those that both had included."""

    tested: int
    right: int
    accepted: int


class CostTotals(msgspec.Struct, frozen=True):
    """What the controller's cost model says of the steps that ran: the seconds it foretold for them, the seconds that
    plain decoding would have needed for the tokens they gave, and its mean relative error of late."""

    predicted_seconds: float
    plain_seconds: float
    error: float


class StepTotals(msgspec.Struct, frozen=True):
    """Steps whose results were read. ``batches[i]`` had at most ``2 ** i`` requests and more than ``2 ** (i - 1)``, the
    last of them any number; ``requests`` is the sum of all batches."""

    drafter: str | None = None
    shape: str | None = None  # of the latest
    shapes: dict[str, ShapeTotals] = {}
    levels: list[LevelTotals] = []
    sources: dict[str, SourceTotals] = {}  # by drafter, where trees have several
    batches: list[int] = msgspec.field(default_factory=lambda: [0])
    requests: int = 0
    cost: CostTotals | None = None  # None: the shape is fixed, nothing was measured


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Counters (since start) and gauges of the engine, sent about once a second while it works."""

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    steps: int
    drafted: int
    accepted: int
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    step_totals: StepTotals = StepTotals()
    violations: int = 0
    late_kernels: int = 0
    eager_steps: int = 0
    pages_idle: int = 0  # cached ones that no request uses


class Starting(msgspec.Struct, tag=True, frozen=True):
    """What the engine is at while it does not serve yet."""

    phase: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine serves. ``info`` is what it resolved: model, context length, pool size, speculation."""

    info: dict[str, Any]


class Broken(msgspec.Struct, tag=True, frozen=True):
    """The engine ends and answers nothing more. ``user_error``: a setting or a checkpoint is at fault."""

    message: str
    user_error: bool = False


ToEngine = Submit | Abort | Flush
ToFront = Starting | Ready | Tokens | Failed | Flushed | Stats | Broken

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(list[ToEngine]).decode
decode_to_front = msgspec.msgpack.Decoder(list[ToFront]).decode
