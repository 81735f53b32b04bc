"""Routes for operators, which OpenAI does not have: health, statistics, tokenization, aborting requests."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from specserve.core import FieldError
from specserve.frontend.conversation import Messages, Variables, of_request, turn
from specserve.frontend.fields import ListOf, Strict, Text
from specserve.frontend.tools import Tools
from specserve.messages import Stats
from specserve.process.client import EngineGone
from specserve.server import schema
from specserve.server.errors import RETRY_AFTER, ApiError
from specserve.server.front import Front
from specserve.server.openapi import answers
from specserve.server.protocol import Int
from specserve.server.writer import Json, unless_left
from specserve.version import __version__, commit

ABORTED = "the request was aborted by POST /abort_request"


class TokenizeRequest(Strict):
    model: str | None = None
    """One of the served names."""
    prompt: Text | None = None
    """A text, tokenized as the prompt of a completion."""
    add_special_tokens: bool | None = None
    """As in completions; only with `prompt`."""
    messages: Messages | None = None
    """A conversation, tokenized as by chat."""
    chat_template_kwargs: Variables | None = None
    """As in chat; only with `messages`."""
    add_generation_prompt: bool | None = None
    """As in chat; only with `messages`."""
    continue_final_message: bool | None = None
    """As in chat; only with `messages`."""
    tools: Tools | None = None
    """Tools of the conversation; only with `messages`."""


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


def add_figures(app: FastAPI, front: Front) -> None:
    """Add the routes that report the server's state."""

    @app.post("/ping", include_in_schema=False)
    @app.get("/ping", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_model=None, responses=answers(schema.Health, unready=schema.Unready))
    async def get_health() -> Response:
        """Return 200 if a request would be served, otherwise 503 and whether it starts, has failed, hangs or stops."""
        health = front.health
        if isinstance(health, schema.Unready):
            return Json(health, 503, {"retry-after": str(RETRY_AFTER[503])})
        return Json(health)

    @app.get("/version", response_model=None, responses=answers(schema.Version))
    async def get_version() -> Response:
        return Json(schema.Version(__version__, commit()))

    @app.head("/live", include_in_schema=False)
    @app.get("/live", response_model=None, responses=answers(schema.Live))
    async def get_live() -> Response:
        """Return 200 as long as this process answers, also while loading or draining. If it does not, restart it."""
        return Json(schema.Live())

    @app.get("/server_info", response_model=None, responses=answers(schema.ServerInfo))
    async def get_server_info() -> dict[str, Any]:
        """Return every resolved setting by its name, and what the engine reports about itself."""
        ready = front.engine.ready
        return {
            **front.settings.public(),
            "version": __version__,
            "commit": commit(),
            "status": front.unready or "ok",
            "choices": ready.notes if ready else [],
            "engine": msgspec.to_builtins(ready.info) if ready else {},
            "speculation": _speculation(front.engine.stats),
        }

    @app.get("/token_statistics", response_model=None, responses=answers(schema.TokenCounts))
    async def get_token_statistics() -> Response:
        """Return how often each token id was generated since the start."""
        if front.token_statistics is None:
            raise ApiError(404, "token statistics are off: start the server with --token-statistics")
        return Json(schema.TokenCounts(*front.token_statistics.report()))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics(http: Request) -> Response:
        text, kind = front.metrics.text(http.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind})


def add_operations(app: FastAPI, front: Front) -> None:
    """Add the routes that perform an operation."""

    @app.post("/tokenize", response_model=None, responses=answers(schema.Tokenized))
    async def post_tokenize(request: TokenizeRequest, http: Request) -> Response:
        """Return the token ids of a completion's ``prompt`` or of a chat's ``messages``."""
        capacity = front.serving(request.model).capacity
        if (request.prompt is None) == (request.messages is None):
            raise FieldError("prompt", "give either prompt or messages")
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if getattr(request, name) and request.messages is None:
                raise FieldError(name, "only with messages")
        if request.messages is not None:
            if request.add_special_tokens:
                raise FieldError("add_special_tokens", "only with prompt")
            messages = of_request(request.messages)
            variables = request.chat_template_kwargs
            ends = turn(messages, request.add_generation_prompt, request.continue_final_message)
            work = front.tokenizing.encode_chat(messages, capacity, request.tools or (), variables, ends)
        else:
            special = request.add_special_tokens is not False
            work = front.tokenizing.encode(request.prompt or "", "prompt", capacity, special)
        tokens = await unless_left(http.receive, work)
        return Json(schema.Tokenized(tokens, len(tokens), capacity.room))

    @app.post("/detokenize", response_model=None, responses=answers(schema.Detokenized))
    async def post_detokenize(request: DetokenizeRequest, http: Request) -> Response:
        """Return the text of token ids, special ones included."""
        capacity = front.serving(request.model).capacity
        work = front.tokenizing.decode(request.tokens, "tokens", capacity)
        return Json(schema.Detokenized(await unless_left(http.receive, work)))

    @app.post("/abort_request", response_model=None, responses=answers(schema.Aborted))
    async def post_abort_request(request: AbortRequest) -> Response:
        """Abort one call's requests, by the ``id`` of its answer, or all. Returns how many had not ended."""
        if (request.rid is None) != request.abort_all:
            raise FieldError("rid", "give either the id of an answer or abort_all: true")
        return Json(schema.Aborted(front.engine.end_calls(request.rid, ABORTED)))

    @app.post("/flush_cache", response_model=None, responses=answers(schema.Flushed))
    async def post_flush_cache() -> Response:
        """Empty the prefix cache of an idle server. Returns the number of pages freed."""
        front.serving()
        try:
            pages = None if front.engine.open else await front.engine.flush_cache()
        except EngineGone as error:
            raise ApiError(503, str(error), code="not_ready") from None
        if pages is None:
            raise ApiError(400, f"the cache is in use by {front.engine.open} requests", code="busy")
        return Json(schema.Flushed(pages))


def _speculation(stats: Stats | None) -> dict[str, Any] | None:
    """Return the figures since start, and the latest step's shape. None before the engine's first step."""
    if stats is None or stats.step_totals.shape is None:
        return None
    totals, cost = stats.step_totals, stats.step_totals.cost
    steps = sum(shape.steps for shape in totals.shapes.values())
    seconds = sum(shape.seconds for shape in totals.shapes.values())
    return {
        "drafter": totals.drafter,
        "shape": totals.shape,
        "share_of_steps": {
            name: round(each.steps / steps, 4) for name, each in sorted(totals.shapes.items())
        },
        "acceptance_by_level": [round(level.accepted / max(level.tested, 1), 4) for level in totals.levels],
        # Over plain decoding, by the cost model.
        "speed_up": None if cost is None else round(cost.plain_seconds / max(seconds, 1e-9), 4),
    }
