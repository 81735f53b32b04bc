"""POST /v1/messages and /v1/messages/count_tokens, and the writer of messages, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from msgspec import Struct
from starlette.responses import Response

from specserve.frontend.conversation import of_request, read_object, turn
from specserve.frontend.generation import Job
from specserve.frontend.parsers.base import parts
from specserve.server.anthropic import schema
from specserve.server.anthropic.request import CountTokensRequest, MessagesRequest
from specserve.server.chat import ChatRequest, calls_of, finish_reason
from specserve.server.errors import ANTHROPIC, ApiError
from specserve.server.front import Front
from specserve.server.openapi import answers
from specserve.server.schema import AnthropicError
from specserve.server.translate import Block, Blocks, Step, blocks
from specserve.server.writer import Json, Writer, unless_left


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
    for words in request.unheeded(_has_budgets(front)):
        front.note_once(f"{ANTHROPIC}: {words}")


def _has_budgets(front: Front) -> bool:
    return front.served is not None and front.served.no_budgets is None


async def _message(front: Front, request: MessagesRequest) -> Response:
    chat = request.chat()
    chat.fields["thinking_token_budget"] = request.budget if _has_budgets(front) else None
    return await (await chat.begin(front, _MessageWriter)).respond()


async def _count(front: Front, request: CountTokensRequest) -> Response:
    chat = request.chat()
    made = chat.request()
    with chat.named():
        served = front.serving(made.model)
        calls, messages = calls_of(served, made), of_request(made.messages)
        tools, variables = calls.tools if calls else (), made.chat_template_kwargs
        ends = turn(messages, None, made.continue_final_message)
        prompt = await front.tokenizing.encode_chat(messages, served.capacity, tools, variables, ends)
    return Json(schema.TokenCount(len(prompt)))


class _MessageWriter(Writer):
    named_events: ClassVar[bool] = True

    def __init__(self, front: Front, request: ChatRequest, jobs: list[Job]) -> None:
        super().__init__(front, request, jobs, "msg_")
        self._new_id = front.new_call_id
        self._ended = 0  # number of blocks

    async def whole(self) -> schema.AnswerOfMessages:
        (answer,) = self.generation.answers
        content = [_content(block) for block in blocks(answer.events, self._new_id)]
        return self._message(content, *self._stop())

    async def chunks(self) -> AsyncIterator[Struct]:
        """Yield the message without content, its blocks and their deltas, then the stop reason."""
        row = Blocks(self._new_id)
        begun = False
        async for _, delta in self.generation.deltas():
            if not begun:
                begun = True
                yield schema.MessageStart(self._message([], None, None))
                yield schema.Ping()
            for step in row.add(delta.events):
                yield self._event(step)
        for step in row.end():
            yield self._event(step)
        yield schema.MessageDelta(schema.StopDelta(*self._stop()), self._message_usage())
        yield schema.MessageStop()

    def failed(self, error: ApiError) -> Struct:
        return error.anthropic_body

    def _event(self, step: Step) -> schema.MessageEvent:
        """Return the event of a step. It concerns the first block that has not ended."""
        phase, block, text = step
        index = self._ended
        if phase == "begin":
            return schema.BlockStart(index, _content(block))
        if phase == "more":
            return schema.BlockDelta(index, _PIECES[block.kind](text))
        self._ended += 1
        return schema.BlockStop(index)

    def _stop(self) -> tuple[schema.StopReason, str | None]:
        """Return why the answer ended, with the stop string if one ended it. Not ``tool_use`` if the arguments of a
        call are no JSON object."""
        (answer,), (job,) = self.generation.answers, self.generation.jobs
        reason = finish_reason(answer)
        if reason == "length":
            cut = len(answer.token_ids) == job.params.max_tokens
            return "max_tokens" if cut else "model_context_window_exceeded", None
        calls = parts(answer.events).calls
        if reason == "tool_calls" and all(read_object(arguments) is not None for _, arguments in calls):
            return "tool_use", None
        return "end_turn" if answer.stop is None else "stop_sequence", answer.stop

    def _message(self, content: list[schema.ContentBlock], *stop: Any) -> schema.AnswerOfMessages:
        reason, sequence = stop
        return schema.AnswerOfMessages(
            id=self.generation.name,
            model=self._head["model"],
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._message_usage(),
        )

    def _message_usage(self) -> schema.MessageUsage:
        usage = self.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return schema.MessageUsage(usage.prompt_tokens - cached, cached, usage.completion_tokens)


_PIECES: dict[str, type[Any]] = {
    "content": schema.TextPiece,
    "reasoning": schema.ThinkingPiece,
    "call": schema.InputPiece,
}


def _content(block: Block) -> schema.ContentBlock:
    """Return a block's content so far. The input of a call is empty until it ends; then a call whose arguments are cut
    off, or not a JSON object for another reason, is text."""
    if block.kind == "content":
        return schema.TextContent(block.text)
    if block.kind == "reasoning":
        return schema.ThinkingContent(block.text)
    given = read_object(block.text)
    if given is None and block.ended:
        return schema.TextContent(f"{block.name}{block.text}")
    return schema.ToolUse(block.call_id, block.name, given or {})
