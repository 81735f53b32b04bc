"""The HTTP application: routes and nothing else."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response

from specserve import __version__
from specserve.server import schema
from specserve.server.auth import ApiKey, CountAnswers
from specserve.server.body import BoundedRoute, LimitBody, Turns
from specserve.server.chat import ChatRequest, chat
from specserve.server.completions import CompletionRequest, complete
from specserve.server.errors import ApiError, Json, add_handlers
from specserve.server.front import Front, is_served
from specserve.server.openapi import add_answers, answers
from specserve.server.operations import (
    AbortRequest,
    DetokenizeRequest,
    TokenizeRequest,
    abort_request,
    detokenize,
    flush_cache,
    tokenize,
)
from specserve.server.playground.routes import add_playground
from specserve.server.report import speculation_report
from specserve.server.request_ids import HEADER, RequestIds
from specserve.server.streaming import unless_left


def create_app(front: Front) -> FastAPI:
    """Builds the app around a front that may still be loading."""
    app = FastAPI(
        title="specserve", version=__version__, separate_input_output_schemas=False, redirect_slashes=False
    )
    app.router.route_class = BoundedRoute
    app.state.front = front
    app.state.turns = Turns()
    add_handlers(app)
    _add_openai(app, front)
    _add_operations(app, front)
    add_playground(app)
    describe = app.openapi
    app.openapi = lambda: add_answers(describe())  # type: ignore[method-assign]
    if front.settings.api_key is not None:
        app.add_middleware(ApiKey, key=front.settings.api_key)
    app.add_middleware(LimitBody, most=front.settings.max_body_bytes)
    if origins := front.settings.cors_origin:
        every = ["*"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=every,
            allow_headers=every,
            expose_headers=[HEADER],
        )
    app.add_middleware(CountAnswers, front=front)
    app.add_middleware(RequestIds)
    return app


def _add_openai(app: FastAPI, front: Front) -> None:
    @app.post(
        "/v1/chat/completions",
        response_model=None,
        responses=answers(schema.ChatCompletion, schema.ChatCompletionChunk),
    )
    async def post_chat(request: ChatRequest, http: Request) -> Response:
        return await unless_left(http, chat(front, request))

    @app.post("/v1/completions", response_model=None, responses=answers(schema.Completion, schema.Completion))
    async def post_completions(request: CompletionRequest, http: Request) -> Response:
        return await unless_left(http, complete(front, request))

    @app.get("/v1/models", response_model=None, responses=answers(schema.Models))
    async def get_models() -> Json:
        """503 until a request would be served: clients of SGLang wait for this answer."""
        if front.unready is not None:
            raise ApiError(503, front.unready, code="not_ready")
        return Json(schema.Models([_model(front, name) for name in front.settings.served_model_name]))

    @app.get("/v1/models/{name:path}", response_model=None, responses=answers(schema.Model))
    async def get_model(name: str) -> Json:
        if not is_served(name, front.settings.served_model_name):
            raise ApiError(404, f"no model {name!r} here", "model", "model_not_found")
        return Json(_model(front, name))


def _add_operations(app: FastAPI, front: Front) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_model=None, responses=answers(schema.Health))
    async def get_health() -> Json:
        if front.unready is not None:
            raise ApiError(503, front.unready, code="not_ready")
        return Json(schema.Health())

    @app.head("/live", include_in_schema=False)
    @app.get("/live", response_model=None, responses=answers(schema.Live))
    async def get_live() -> Json:
        """200 as long as this process answers, loading and draining included: when it does not, restart it."""
        return Json(schema.Live())

    @app.get("/server_info", response_model=None, responses=answers(schema.ServerInfo))
    async def get_server_info() -> dict[str, Any]:
        """Every setting by its name, as resolved, and what the engine reports of itself."""
        engine = {key: value for key, value in front.engine.info.items() if key not in ("settings", "notes")}
        return {
            **front.settings.public(),
            "version": __version__,
            "status": front.unready or "ok",
            "choices": front.engine.info.get("notes", []),
            "engine": engine,
            "speculation": speculation_report(front.engine.stats),
        }

    @app.post("/tokenize", response_model=None, responses=answers(schema.Tokenized))
    async def post_tokenize(request: TokenizeRequest, http: Request) -> Response:
        return await unless_left(http, tokenize(front, request))

    @app.post("/detokenize", response_model=None, responses=answers(schema.Detokenized))
    async def post_detokenize(request: DetokenizeRequest, http: Request) -> Response:
        return await unless_left(http, detokenize(front, request))

    @app.post("/abort_request", response_model=None, responses=answers(schema.Aborted))
    async def post_abort_request(request: AbortRequest) -> Json:
        return Json(await abort_request(front, request))

    @app.post("/flush_cache", response_model=None, responses=answers(schema.Flushed))
    async def post_flush_cache() -> Json:
        return Json(await flush_cache(front))

    @app.get("/token_statistics", response_model=None, responses=answers(schema.TokenCounts))
    async def get_token_statistics() -> Json:
        """How often each token id was generated since start."""
        if front.token_statistics is None:
            raise ApiError(404, "token statistics are off: start the server with --token-statistics")
        return Json(schema.TokenCounts(*front.token_statistics.report()))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics(http: Request) -> Response:
        text, kind = front.metrics.text(http.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind})


def _model(front: Front, name: str) -> schema.Model:
    return schema.Model(name, front.started)
