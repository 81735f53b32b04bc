"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from specserve.core import FieldError
from specserve.frontend.conversation import of_request
from specserve.server.anthropic import schema
from specserve.server.anthropic.request import CountTokensRequest, MessagesRequest
from specserve.server.anthropic.writer import MessageWriter
from specserve.server.chat import begin, callable_tools
from specserve.server.errors import ANTHROPIC
from specserve.server.front import Front
from specserve.server.openapi import answers
from specserve.server.schema import AnthropicError
from specserve.server.streaming import Json, unless_left

VERSION = "2023-06-01"


def add_messages(app: FastAPI, front: Front) -> None:
    """Adds the routes."""
    answer = answers(schema.AnswerOfMessages, schema.EVENTS, error=AnthropicError)

    @app.post(ANTHROPIC, response_model=None, responses=answer)
    async def post_messages(request: MessagesRequest, http: Request) -> Response:
        _begin(front, request, http)
        return await unless_left(http.receive, _message(front, request))

    count = answers(schema.TokenCount, error=AnthropicError)

    @app.post(f"{ANTHROPIC}/count_tokens", response_model=None, responses=count)
    async def post_count_tokens(request: CountTokensRequest, http: Request) -> Response:
        """How many tokens the prompt of a message would have."""
        _begin(front, request, http)
        return await unless_left(http.receive, _count(front, request))


def _begin(front: Front, request: CountTokensRequest, http: Request) -> None:
    """Raises FieldError for a version that is not spoken, and notes what of the request changes nothing."""
    version = http.headers.get("anthropic-version", VERSION)
    if version != VERSION:
        raise FieldError("anthropic-version", f"must be {VERSION}, found {version[:80]!r}")
    for words in request.unheeded():
        front.note_once(f"{ANTHROPIC}: {words}")


async def _message(front: Front, request: MessagesRequest) -> Response:
    chat = request.chat()
    made = chat.request()
    with chat.named():
        writer = await begin(front, made, MessageWriter)
    return await writer.respond()


async def _count(front: Front, request: CountTokensRequest) -> Response:
    chat = request.chat()
    made = chat.request()
    with chat.named():
        front.check_call(made.model)
        tools = callable_tools(front, made)
        prompt = await front.encode_chat(of_request(made.messages), tools, made.chat_template_kwargs)
    return Json(schema.TokenCount(len(prompt)))
