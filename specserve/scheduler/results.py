"""Results of launches: what of an emission counts, the message to the front, and what the controller learns."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.engine.runner import Emitted
from specserve.messages import FinishReason, Tokens
from specserve.scheduler.request import Request
from specserve.speculation.control.acceptance import Given


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


def given_by(requests: Sequence[Request], found: Sequence[Emitted], kept: int, stopped: int) -> Given:
    """Return what a step gave. ``kept``: tokens of all requests up to their ends; ``stopped``: requests that a stop
    token ended."""
    return Given(
        emitted=[len(each.tokens) for each in found],
        drafted=[each.drafted for each in found],
        chains=[each.chain for each in found],
        firsts=[each.firsts for each in found],
        guided={i for i, r in enumerate(requests) if r.skill.predicted and found[i].predicted.start >= 0},
        kept=kept,
        stopped=stopped,
    )
