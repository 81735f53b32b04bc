"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from specserve.frontend.conversation import of_request
from specserve.server.anthropic import schema
from specserve.server.anthropic.request import CountTokensRequest, MessagesRequest
from specserve.server.anthropic.writer import MessageWriter
from specserve.server.chat import begin, calls_of
from specserve.server.errors import ANTHROPIC
from specserve.server.front import Front
from specserve.server.openapi import answers
from specserve.server.schema import AnthropicError
from specserve.server.streaming import Json, unless_left


def add_messages(app: FastAPI, front: Front) -> None:
    answer = answers(schema.AnswerOfMessages, schema.EVENTS, error=AnthropicError)

    @app.post(ANTHROPIC, response_model=None, responses=answer)
    async def post_messages(request: MessagesRequest, http: Request) -> Response:
        _note(front, request)
        return await unless_left(http.receive, _message(front, request))

    count = answers(schema.TokenCount, error=AnthropicError)

    @app.post(f"{ANTHROPIC}/count_tokens", response_model=None, responses=count)
    async def post_count_tokens(request: CountTokensRequest, http: Request) -> Response:
        """Count the tokens that a message's prompt would have."""
        _note(front, request)
        return await unless_left(http.receive, _count(front, request))


def _note(front: Front, request: CountTokensRequest) -> None:
    """Log what in the request has no effect."""
    for words in request.unheeded(front.no_budgets is None):
        front.note_once(f"{ANTHROPIC}: {words}")


async def _message(front: Front, request: MessagesRequest) -> Response:
    chat = request.chat()
    chat.fields["thinking_token_budget"] = request.budget if front.no_budgets is None else None
    made = chat.request()
    with chat.named():
        writer = await begin(front, made, MessageWriter)
    return await writer.respond()


async def _count(front: Front, request: CountTokensRequest) -> Response:
    chat = request.chat()
    made = chat.request()
    with chat.named():
        front.check_call(made.model)
        tools = calls_of(front, made).tools
        prompt = await front.encode_chat(of_request(made.messages), tools, made.chat_template_kwargs)
    return Json(schema.TokenCount(len(prompt)))
