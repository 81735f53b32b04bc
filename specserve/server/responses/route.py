"""POST /v1/responses."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from specserve.server.chat import begin
from specserve.server.front import Front
from specserve.server.openapi import answers
from specserve.server.responses.request import ResponsesRequest
from specserve.server.responses.schema import EVENTS, ResponseObject
from specserve.server.responses.writer import ResponseWriter
from specserve.server.streaming import unless_left


def add_responses(app: FastAPI, front: Front) -> None:
    @app.post("/v1/responses", response_model=None, responses=answers(ResponseObject, EVENTS))
    async def post_responses(request: ResponsesRequest, http: Request) -> Response:
        return await unless_left(http.receive, _respond(front, request))


async def _respond(front: Front, request: ResponsesRequest) -> Response:
    chat = request.chat()
    made = chat.request()
    with chat.named():
        writer = await begin(front, made, partial(ResponseWriter, request))
    return await writer.respond()
