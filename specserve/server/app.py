"""The HTTP application and its routes."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from specserve import __version__
from specserve.server import schema
from specserve.server.anthropic.routes import add_messages
from specserve.server.chat import add_chat
from specserve.server.completions import add_completions
from specserve.server.errors import HEADER, ApiError, add_handlers
from specserve.server.front import Front, Served
from specserve.server.middleware import (
    ApiKeys,
    BoundedRoute,
    CountAnswers,
    LimitBody,
    RequestIds,
    Tenants,
    Turns,
    UnknownFields,
)
from specserve.server.openapi import add_answers, answers
from specserve.server.operations import add_figures, add_operations
from specserve.server.playground import add_playground
from specserve.server.responses.routes import add_responses
from specserve.server.writer import Json


def create_app(front: Front) -> FastAPI:
    """Build the app around a front that may still be loading."""
    app = FastAPI(
        title="specserve", version=__version__, separate_input_output_schemas=False, redirect_slashes=False
    )
    app.router.route_class = BoundedRoute
    app.state.front = front
    app.state.turns = Turns()
    add_handlers(app)
    add_chat(app, front)
    add_completions(app, front)
    add_responses(app, front)
    add_messages(app, front)
    _add_embeddings(app)
    _add_models(app, front)
    add_figures(app, front)
    add_operations(app, front)
    add_playground(app)
    describe = app.openapi
    app.openapi = lambda: add_answers(describe())  # type: ignore[method-assign]
    app.add_middleware(Tenants)
    if front.settings.unknown_fields == "log":
        app.add_middleware(UnknownFields, front=front)
    if front.settings.api_key is not None:
        app.add_middleware(ApiKeys, keys=front.settings.api_key, metrics=front.metrics)
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
    app.add_middleware(RequestIds, logs=not front.settings.disable_log_requests, traces=front.traces)
    return app


def _add_embeddings(app: FastAPI) -> None:
    @app.post("/v1/embeddings", include_in_schema=False)
    async def post_embeddings() -> None:
        raise ApiError(400, "embeddings: this server only generates text", code="unsupported_endpoint")


def _add_models(app: FastAPI, front: Front) -> None:
    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models/", include_in_schema=False)
    @app.get("/v1/models", response_model=None, responses=answers(schema.Models))
    async def get_models() -> Json:
        """List the served models; 503 until requests would be served, because clients of SGLang wait for this."""
        served = front.serving()
        return Json(
            schema.Models([_model(front, served, name) for name in served.settings.served_model_name])
        )

    @app.get("/v1/models/{name:path}", response_model=None, responses=answers(schema.Model))
    async def get_model(name: str) -> Json:
        return Json(_model(front, front.serving(name), name))


def _model(front: Front, served: Served, name: str) -> schema.Model:
    return schema.Model(name, front.started, served.capacity.room)
