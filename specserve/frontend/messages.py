"""What the front process and the engine say to each other: one direction each way, no call-backs.

Front to engine: Submit, Abort. Engine to front: Tokens, Failed, Stats, Ready, Broken. Encoded with msgpack
(docs/decisions).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from specserve.core import SamplingParams, SpeculationUsage, TokenLogprob

FinishReason = Literal["stop", "length"]


class Submit(msgspec.Struct, tag=True, frozen=True):
    """A new request. ``choice`` tells apart the ``n`` answers of one call; it keys the sampler's noise."""

    rid: str
    token_ids: list[int]
    params: SamplingParams
    choice: int = 0


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Ends a request whose answer nobody waits for; unknown ids are ignored. Answered by nothing."""

    rid: str


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """Newly chosen tokens of a request, in order. The last message carries ``finish_reason``.

    ``cached_tokens`` and ``speculation`` are totals so far, in every message: a stop string may end it there.

    ``runs`` splits ``token_ids`` by step: accepted drafts and the bonus token of one target forward each.
    A matched stop token is the last of ``token_ids`` and ``stop_token`` is true.
    """

    rid: str
    token_ids: list[int]
    runs: list[int]
    finish_reason: FinishReason | None = None
    stop_token: bool = False
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    speculation: SpeculationUsage | None = None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The request was refused or lost; it gets no more tokens. ``param`` names the field at fault, if any."""

    rid: str
    message: str
    param: str | None = None
    client_error: bool = True


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


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine serves. ``info`` is what it resolved: model, context length, pool size, speculation."""

    info: dict[str, Any]


class Broken(msgspec.Struct, tag=True, frozen=True):
    """The engine ends and answers nothing more. ``user_error``: a setting or a checkpoint is at fault."""

    message: str
    user_error: bool = False


ToEngine = Submit | Abort
ToFront = Tokens | Failed | Stats | Ready | Broken

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
