"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Annotated, ClassVar, TypeVar

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from specserve.core import MAX_LOGPROBS, FieldError, SamplingParams, TokenLogprob
from specserve.frontend.conversation import Messages, Variables, of_request
from specserve.frontend.fields import Refusal
from specserve.frontend.generation import Job
from specserve.frontend.output import Delta
from specserve.frontend.parsers.registry import FORMATS
from specserve.frontend.tools import NEEDS_GRAMMAR, Tool, ToolChoice, Tools
from specserve.server.call import Writer, with_prediction
from specserve.server.front import Front
from specserve.server.logprobs import chat_logprobs
from specserve.server.openapi import answers
from specserve.server.parsed import Deltas, finish_reason, message
from specserve.server.protocol import Count, GenerationRequest, check_stream_options, sampling_params
from specserve.server.schema import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
)
from specserve.server.streaming import unless_left
from specserve.server.structured import form_of, with_grammar

W = TypeVar("W", bound=Writer)


class ChatRequest(GenerationRequest):
    refused: ClassVar[Mapping[str, Refusal]] = {
        **GenerationRequest.refused,
        "functions": Refusal("its newer name is tools", []),
        "function_call": Refusal("its newer name is tool_choice", "none"),
        "audio": Refusal("text alone"),
        "modalities": Refusal("text alone", ["text"]),
        "reasoning_effort": Refusal("the effort of a model can't be set", "none"),
        "verbosity": Refusal("the verbosity of a model can't be set", "medium"),
        "add_generation_prompt": Refusal("an answer is always begun", True),
        "web_search_options": Refusal("there is no web search"),
        "moderation": Refusal("nothing is moderated"),
        "store": Refusal("nothing is stored", False),
        "service_tier": Refusal("there are no tiers", "auto", "default"),
        "prompt_cache_options": Refusal("the prefix cache is shared by all and can't be set by request"),
        "prompt_cache_retention": Refusal("the prefix cache can't be set by request"),
    }
    messages: Messages
    """The conversation, for the model's chat template."""
    max_completion_tokens: Count | None = None
    """The newer name of `max_tokens`; both only if equal."""
    logprobs: bool | None = None
    """Log-probabilities of the answer's tokens."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Alternatives for each token; only with `logprobs`."""
    chat_template_kwargs: Variables | None = None
    """Variables of the chat template, such as `enable_thinking`: those that it reads, others at false or null."""
    tools: Tools | None = None
    """Functions that the model may call, if its chat template has a place for them."""
    tool_choice: ToolChoice | None = None
    """`none` leaves the tools out of the prompt. Not set: `auto`, if there are tools."""
    parallel_tool_calls: bool | None = None
    """false, for one call at most, is refused where tools may be called: it needs a grammar."""
    safety_identifier: str | None = None
    """A label that changes no answer."""
    prompt_cache_key: str | None = None
    """A label that changes no answer; prompts share cached prefixes without it."""
    metadata: dict[str, str] | None = None
    """Labels that change no answer."""


def add_chat(app: FastAPI, front: Front) -> None:
    """Adds the route."""

    @app.post(
        "/v1/chat/completions", response_model=None, responses=answers(ChatCompletion, ChatCompletionChunk)
    )
    async def post_chat(request: ChatRequest, http: Request) -> Response:
        return await unless_left(http.receive, _chat(front, request))


async def _chat(front: Front, request: ChatRequest) -> Response:
    writer = await begin(front, request, _Writer)
    return await writer.respond()


async def begin(front: Front, request: ChatRequest, make: Callable[[Front, ChatRequest, list[Job]], W]) -> W:
    """Checks a request and submits its answers: whoever asks for a chat, in whichever API's words, comes by here.
    ``make`` writes the answers. Raises FieldError and ApiError that name the request's fields."""
    front.check_call(request.model)
    check_stream_options(request)
    params = _params(front, request)
    tools = callable_tools(front, request)
    if tools and (form := form_of(request)) is not None:
        raise FieldError(form, "an answer of this form can't call tools: leave them out, or tool_choice none")
    with front.place(request.choices, "n"):
        messages = of_request(request.messages)
        prompt = await front.encode_chat(messages, tools, request.chat_template_kwargs)
        params = await with_prediction(front, request, params)
        params = await with_grammar(request, params, front.no_grammars)
        front.check(prompt, params, "messages")
        parsers = [front.answer_parser(prompt, tools) for _ in range(request.choices)]
        if params.grammar is not None and parsers[0].thinking:
            words = "the prompt leaves the model thinking, and an answer has its form from the beginning"
            raise FieldError(str(form_of(request)), words)
        jobs = [
            Job(prompt, params, choice, request.streams_runs, parser) for choice, parser in enumerate(parsers)
        ]
        writer = make(front, request, jobs)
        writer.generation.submit()
    return writer


def _params(front: Front, request: ChatRequest) -> SamplingParams:
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise FieldError("max_completion_tokens", "differs from max_tokens, its older name")
    if request.top_logprobs and not request.logprobs:
        raise FieldError("top_logprobs", "only with logprobs: true")
    return sampling_params(
        request,
        vocab_size=front.vocab_size,
        max_tokens=next(iter(limits), None),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        default_temperature=front.default_temperature,
    )


def callable_tools(front: Front, request: ChatRequest) -> list[Tool]:
    """Those that the model may call. Raises FieldError for what can't be had."""
    if not request.tools or request.tool_choice == "none":
        return []
    if request.parallel_tool_calls is False:
        words = f"not supported: false, with tools: {NEEDS_GRAMMAR}"
        raise FieldError("parallel_tool_calls", words, "unsupported_parameter")
    if front.has_tokenizer and front.calls_format is None:
        words = "not supported: it is not known how this model writes calls (--tool-call-parser)"
        raise FieldError("tools", words, "unsupported_parameter")
    return request.tools


class _Writer(Writer):
    def __init__(self, front: Front, request: ChatRequest, jobs: list[Job]) -> None:
        super().__init__(front, request, jobs, "chatcmpl")
        self._new_id = (front.calls_format or FORMATS["hermes"]).new_id
        self._top = (request.top_logprobs or 0) if request.logprobs else None

    async def whole(self) -> ChatCompletion:
        choices = []
        for index, found in enumerate(self.generation.answers):
            assert found.finish_reason is not None, "the jobs have ended"
            said, logprobs = message(found.events, self._new_id), self._logprobs(found.logprobs)
            reason, ids = finish_reason(found.finish_reason, found.events), self._ids(found.token_ids)
            choices.append(ChatChoice(index, said, logprobs, reason, ids))
        usage, prompt = self._usage(), self._prompt_ids(0)
        return ChatCompletion(**self._head, choices=choices, usage=usage, prompt_token_ids=prompt)

    async def chunks(self) -> AsyncIterator[ChatCompletionChunk]:
        """Per choice: the role, what the answer has as it comes, the finish reason; then the usage of all, if asked
        for."""
        begun: dict[int, Deltas] = {}
        async for index, delta in self.generation.deltas():
            if index not in begun:
                begun[index] = Deltas(self._new_id)
                first = self._chunk(ChatChunkChoice(index, ChatDelta("", "assistant")))
                first.prompt_token_ids = self._prompt_ids(index)
                yield first
            for choice in self._pieces(index, begun[index], delta):
                yield self._chunk(choice)
            if delta.finish_reason:
                reason = finish_reason(delta.finish_reason, self.generation.answers[index].events)
                yield self._chunk(ChatChunkChoice(index, ChatDelta(), finish_reason=reason))
        if self._include_usage:
            yield ChatCompletionChunk(**self._head, choices=[], usage=self._usage())

    def _pieces(self, index: int, deltas: Deltas, delta: Delta) -> Iterator[ChatChunkChoice]:
        """What a message of the engine adds; the first piece has what is known of its tokens."""
        found = deltas.of(delta.events)
        has_ids = self._with_ids and delta.token_ids
        if not found and (delta.logprobs or has_ids or (delta.pieces and self._streams_runs)):
            found = [ChatDelta("")]
        for number, each in enumerate(found):
            choice = ChatChunkChoice(index, each)
            if number == 0:
                choice.logprobs = self._logprobs(delta.logprobs or [])
                choice.token_ids, choice.speculation = self._ids(delta.token_ids), self._runs(delta)
            yield choice

    def _chunk(self, choice: ChatChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._head, choices=[choice], usage=self._usage_of_chunk(choice.index))

    def _logprobs(self, found: list[TokenLogprob]) -> ChatLogprobs | None:
        return None if self._top is None else chat_logprobs(found, self._top, self._front.tokenizer)
