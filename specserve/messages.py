"""Messages between the front process and the engine. One direction each way, no callbacks.

Front to engine: Submit, Abort, Flush. Engine to front: Starting, Ready, Tokens, Failed, Flushed, Stats, Broken. Encoded
with msgpack as lists: everything that is ready is sent together (docs/decisions/0001-messages.md).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from specserve.core import SamplingParams, SpeculationUsage, TokenLogprob

FinishReason = Literal["stop", "length"]
Fault = Literal["request", "server", "unavailable", "timeout", "aborted"]


class Submit(msgspec.Struct, tag=True, frozen=True):
    """A new request. ``choice`` numbers the ``n`` answers of one call and keys the sampler's noise. ``tenant``
    identifies the caller: one tenant's answers are never proposed as drafts to another, and cached prefixes are shared
    only with requests of the same ``salt``."""

    rid: str
    token_ids: list[int]
    params: SamplingParams
    choice: int = 0
    tenant: str = ""
    salt: str = ""


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End a request whose answer is no longer wanted. Unknown ids are ignored; there is no reply."""

    rid: str


class Flush(msgspec.Struct, tag=True, frozen=True):
    """Empty the prefix cache of an idle engine. Flushed replies come in order."""


class Flushed(msgspec.Struct, tag=True, frozen=True):
    """Pages that the prefix cache freed. None: nothing was flushed, because there are requests."""

    pages: int | None


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """New tokens of a request, in order. The last message carries ``finish_reason``.

    ``cached_tokens`` and ``speculation`` are totals so far, in every message, because a stop string may make it the
    last.

    ``runs`` splits ``token_ids`` by step: the accepted drafts and the bonus token of one target forward each. A matched
    stop token comes last in ``token_ids``, with ``stop_token`` set. ``prompt_logprobs``, if asked for, come in the
    first message and omit the prompt's first token. ``queued``: seconds until the request got its first slot and pages.
    ``token_ids`` is empty if no tokens were asked for.
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
    """Merge two consecutive messages of a request."""
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
    """The request was refused or lost and gets no more tokens. ``param`` names the field at fault, if any.

    ``fault``: the request itself, a server error, no engine available, a timeout, or an abort.
    """

    rid: str
    message: str
    param: str | None = None
    fault: Fault = "request"


class ShapeTotals(msgspec.Struct, frozen=True):
    """Steps of one shape, and the device time spent on them in seconds."""

    steps: int
    seconds: float


class LevelTotals(msgspec.Struct, frozen=True):
    """How often a draft level was tested (all levels above were accepted, and the request had at least as many drafted
    nodes as the level is deep), and how often the target chose a token drafted there."""

    tested: int
    accepted: int


class SourceTotals(msgspec.Struct, frozen=True):
    """Counts for one of the drafters that share trees. ``tested``: its first choices that were compared with the text,
    verified or not, as far as the text followed them; ``right``: those that were right; ``accepted``: the accepted
    tokens among its candidates, including those that both drafters proposed."""

    tested: int
    right: int
    accepted: int


class CostTotals(msgspec.Struct, frozen=True):
    """The controller's cost model against the steps that ran: the seconds it predicted for them, the seconds that plain
    decoding would have taken for the same tokens, and its recent mean relative error."""

    predicted_seconds: float
    plain_seconds: float
    error: float


class StepTotals(msgspec.Struct, frozen=True):
    """Totals of the steps whose results were read. ``batches[i]`` counts steps of more than ``2 ** (i - 1)`` and at
    most ``2 ** i`` requests (the last entry has no upper bound); ``requests`` sums the requests of all batches.
    ``iterations`` and ``processed``: the same of iterations by their tokens."""

    drafter: str | None = None
    shape: str | None = None  # of the latest step
    shapes: dict[str, ShapeTotals] = {}
    levels: list[LevelTotals] = []
    sources: dict[str, SourceTotals] = {}  # by drafter, if several share trees
    batches: list[int] = msgspec.field(default_factory=lambda: [0])
    iterations: list[int] = msgspec.field(default_factory=lambda: [0])
    processed: int = 0
    requests: int = 0
    cost: CostTotals | None = None  # None: the shape is fixed, so nothing was measured


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
    pages_idle: int = 0  # cached pages that no request uses
    snapshots: int = 0  # of states, that there is room for
    snapshots_kept: int = 0


class Starting(msgspec.Struct, tag=True, frozen=True):
    """The startup phase that the engine is in."""

    phase: str


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine reports about itself. ``kv_pool``: as ``PoolUse``. ``states``: those of running requests and of
    cached prefixes, and their bytes. ``no_grammars``: why requests can't use grammars, None if they can.
    ``request_defaults``: sampling parameters of requests that don't set them, where they are not OpenAI's. ``ranks``:
    each one's device and process."""

    no_grammars: str | None
    context_length: int
    max_total_tokens: int
    num_pages: int
    page_size: int
    kv_pool: dict[str, int]
    states: dict[str, int]
    vocab_size: int
    eos_token_ids: list[int]
    request_defaults: dict[str, Any]
    system_fingerprint: str | None
    speculation: Any
    cuda_graphs: dict[str, Any]
    ranks: list[dict[str, Any]]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine serves requests, with the resolved ``settings`` by name. ``notes``: the reasons for those chosen
    automatically."""

    info: EngineInfo
    settings: dict[str, Any]
    notes: list[str]


class Broken(msgspec.Struct, tag=True, frozen=True):
    """The engine ends and sends nothing more. ``user_error``: a setting or a checkpoint is at fault."""

    message: str
    user_error: bool = False


ToEngine = Submit | Abort | Flush
ToFront = Starting | Ready | Tokens | Failed | Flushed | Stats | Broken

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(list[ToEngine]).decode
decode_to_front = msgspec.msgpack.Decoder(list[ToFront]).decode
