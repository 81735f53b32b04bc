"""Routes for those who run the server, not of OpenAI: tokens of a text, ending requests, emptying the cache."""

from __future__ import annotations

from specserve.core import FieldError
from specserve.frontend.fields import ListOf, Strict, Text
from specserve.process.client import EngineGone
from specserve.server.errors import ApiError
from specserve.server.front import Front
from specserve.server.messages import Messages, conversation
from specserve.server.protocol import Int
from specserve.server.schema import Aborted, Detokenized, Flushed, Tokenized

ABORTED = "the request was ended by POST /abort_request"


class TokenizeRequest(Strict):
    model: str | None = None
    """One of the served names."""
    prompt: Text | None = None
    """A text, tokenized as the prompt of a completion."""
    messages: Messages | None = None
    """A conversation, tokenized as by chat."""


class DetokenizeRequest(Strict):
    model: str | None = None
    """One of the served names."""
    tokens: ListOf[Int]
    """Token ids."""


class AbortRequest(Strict):
    rid: str | None = None
    """The `id` of an answer."""
    abort_all: bool = False
    """Ends everybody's requests, instead of `rid`."""


async def tokenize(front: Front, request: TokenizeRequest) -> Tokenized:
    """The token ids that a completion of ``prompt``, or a chat of ``messages``, would begin with."""
    front.check_call(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise FieldError("prompt", "give either prompt or messages")
    if request.messages is not None:
        tokens = await front.encode_chat(conversation(request.messages))
    else:
        tokens = await front.encode(request.prompt or "", "prompt")
    return Tokenized(tokens, len(tokens), front.context_length)


async def detokenize(front: Front, request: DetokenizeRequest) -> Detokenized:
    """The text of token ids, special ones included."""
    front.check_call(request.model)
    return Detokenized(await front.decode(request.tokens, "tokens"))


async def abort_request(front: Front, request: AbortRequest) -> Aborted:
    """Ends one call's requests, by the ``id`` of its answer, or all. Returns how many had not ended yet."""
    if (request.rid is None) != request.abort_all:
        raise FieldError("rid", "give either the id of an answer or abort_all: true")
    return Aborted(front.engine.end_calls(request.rid, ABORTED))


async def flush_cache(front: Front) -> Flushed:
    """Empties the prefix cache of an idle server. Returns the number of pages it held."""
    front.check_call(None)
    try:
        pages = None if front.engine.open else await front.engine.flush_cache()
    except EngineGone as error:
        raise ApiError(503, str(error), code="not_ready") from None
    if pages is None:
        raise ApiError(400, f"the cache is in use: {front.engine.open} requests run or wait", code="busy")
    return Flushed(pages)
