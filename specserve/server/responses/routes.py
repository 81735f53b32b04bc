"""Write a response, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any, ClassVar, Literal

from fastapi import FastAPI, Request
from msgspec import UNSET, Struct
from starlette.responses import Response

from specserve.frontend.conversation import read_object
from specserve.frontend.generation import Job
from specserve.server.chat import ChatRequest
from specserve.server.errors import ApiError
from specserve.server.front import Front
from specserve.server.openapi import answers
from specserve.server.responses import schema
from specserve.server.responses.request import ResponsesRequest
from specserve.server.schema import CachedTokens
from specserve.server.translate import Block, Blocks, Step, blocks
from specserve.server.writer import Writer, unless_left


def add_responses(app: FastAPI, front: Front) -> None:
    @app.post("/v1/responses", response_model=None, responses=answers(schema.ResponseObject, schema.EVENTS))
    async def post_responses(request: ResponsesRequest, http: Request) -> Response:
        return await unless_left(http.receive, _respond(front, request))


async def _respond(front: Front, request: ResponsesRequest) -> Response:
    return await (await request.chat().begin(front, partial(_ResponseWriter, request))).respond()


class _ResponseWriter(Writer):
    named_events: ClassVar[bool] = True

    def __init__(self, given: ResponsesRequest, front: Front, request: ChatRequest, jobs: list[Job]) -> None:
        super().__init__(front, request, jobs, "resp_")
        self._given = given
        self._offered = {tool.name: tool for tool in given.offered()}
        self._temperature, self._top_p = jobs[0].params.temperature, jobs[0].params.top_p
        self._new_id = front.new_call_id
        self._sent = 0  # number of events
        self._items: list[schema.OutputItem] = []

    async def whole(self) -> schema.ResponseObject:
        (answer,) = self.generation.answers
        found = blocks(answer.events, self._new_id)
        self._items = [
            self._item(block, self._ended_as(block, self._cut and block is found[-1])) for block in found
        ]
        return self._ended()

    async def chunks(self) -> AsyncIterator[schema.Event]:
        """Yield the response as it begins, its items with their parts and deltas, and the response as it ended."""
        yield self._event(schema.Created, response=self._response("in_progress"))
        yield self._event(schema.InProgress, response=self._response("in_progress"))
        row = Blocks(self._new_id)
        async for _, delta in self.generation.deltas():
            for step in row.add(delta.events):
                for event in self._events(step):
                    yield event
        for step in row.end():
            for event in self._events(step, self._cut):
                yield event
        kind = schema.Cut if self._cut else schema.Completed
        yield self._event(kind, response=self._ended())

    def failed(self, error: ApiError) -> Struct:
        response = self._response("failed")
        response.error = schema.ResponseError(error.code or "server_error", str(error))
        return self._event(schema.Failed, response=response)

    @property
    def _cut(self) -> bool:
        return self.generation.answers[0].finish_reason == "length"

    def _events(self, step: Step, cut: bool = False) -> Iterator[schema.Event]:
        """Yield the events of a step. It concerns the first item that is not done."""
        phase, block, text = step
        index = len(self._items)
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": index}
        if phase == "begin":
            item = self._item(block, "in_progress", begun=True)
            yield self._event(schema.ItemAdded, output_index=index, item=item)
            if block.kind != "call":
                yield self._event(schema.PartAdded, part=_part(block), **place)
        elif phase == "more":
            if not self._is_custom(block):  # its input is known once the arguments are complete
                yield self._event(_DELTAS[block.kind], delta=text, **place)
        else:
            yield from self._end(block, place)
            item = self._item(block, self._ended_as(block, cut))
            self._items.append(item)
            yield self._event(schema.ItemDone, output_index=index, item=item)

    def _end(self, block: Block, place: dict[str, Any]) -> Iterator[schema.Event]:
        if block.kind == "content":
            yield self._event(schema.TextDone, text=block.text, **place)
        elif block.kind == "reasoning":
            yield self._event(schema.ReasoningDone, text=block.text, **place)
        elif self._is_custom(block):
            given = _input(block.text)
            yield self._event(schema.InputDelta, delta=given, **place)
            yield self._event(schema.InputDone, input=given, **place)
        else:
            name = self._offered[block.name].tool.name
            yield self._event(schema.ArgumentsDone, name=name, arguments=block.text, **place)
        if block.kind != "call":
            yield self._event(schema.PartDone, part=_part(block), **place)

    def _event(self, kind: type[schema.Event], **fields: Any) -> schema.Event:
        self._sent += 1
        return kind(sequence_number=self._sent - 1, **fields)

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES['custom' if self._is_custom(block) else block.kind]}_{block.key}"

    def _is_custom(self, block: Block) -> bool:
        return block.kind == "call" and self._offered[block.name].custom

    @staticmethod
    def _ended_as(block: Block, cut: bool) -> schema.ItemStatus:
        """Return the status of an item that has ended: a call is incomplete without valid arguments."""
        return _status(cut or (block.kind == "call" and read_object(block.text) is None))

    def _item(self, block: Block, status: schema.ItemStatus, begun: bool = False) -> schema.OutputItem:
        """Return a block as an item; ``begun``: still without content."""
        head: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "content":
            return schema.OutputMessage(content=[] if begun else [schema.OutputText(block.text)], **head)
        if block.kind == "reasoning":
            return schema.ReasoningItem(content=[] if begun else [schema.ReasoningText(block.text)], **head)
        called = self._offered[block.name]
        head |= {"call_id": block.call_id, "name": called.tool.name, "namespace": called.namespace or UNSET}
        if called.custom:
            return schema.CustomCallItem(input="" if begun else _input(block.text), **head)
        return schema.FunctionCallItem(arguments=block.text, **head)

    def _ended(self) -> schema.ResponseObject:
        found = self._response(_status(self._cut))
        usage = self.usage()
        found.usage = schema.ResponseUsage(
            usage.prompt_tokens,
            CachedTokens(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            schema.ReasoningTokens(usage.completion_tokens_details.reasoning_tokens or 0),
            usage.total_tokens,
        )
        found.incomplete_details = schema.Incomplete() if self._cut else None
        return found

    def _response(self, status: schema.Status) -> schema.ResponseObject:
        given = self._given
        shown = given.model_dump(by_alias=True, exclude_none=True)
        labels = {name: shown.get(name, UNSET) for name in ("user", "prompt_cache_key", "safety_identifier")}
        return schema.ResponseObject(
            id=self.generation.name,
            created_at=self._head["created"],
            status=status,
            model=given.model,
            output=list(self._items),
            instructions=given.instructions,
            max_output_tokens=given.max_output_tokens,
            metadata=given.metadata or {},
            parallel_tool_calls=given.parallel_tool_calls is not False,
            reasoning={"effort": None, "summary": None, **shown.get("reasoning", {})},
            temperature=self._temperature,
            text={"format": {"type": "text"}, **shown.get("text", {})},
            tool_choice=shown.get("tool_choice", "auto"),
            tools=shown.get("tools", []),
            top_p=self._top_p,
            **labels,
        )


_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc", "custom": "ctc"}
_DELTAS: dict[str, type[schema.Event]] = {
    "content": schema.TextDelta,
    "reasoning": schema.ReasoningDelta,
    "call": schema.ArgumentsDelta,
}


def _status(cut: bool) -> Literal["incomplete", "completed"]:
    return "incomplete" if cut else "completed"


def _part(block: Block) -> schema.OutputText | schema.ReasoningText:
    kind = schema.OutputText if block.kind == "content" else schema.ReasoningText
    return kind(block.text)


def _input(arguments: str) -> str:
    """Return the input of a custom tool: its only argument ``input``, or else the arguments as the model wrote them."""
    found = read_object(arguments)
    given = None if found is None or len(found) != 1 else found.get("input")
    return given if isinstance(given, str) else arguments
