"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from specserve.core import MAX_COUNT, MAX_LOGPROBS, FieldError, SamplingParams, TokenLogprob
from specserve.frontend.answers import AnswerParser
from specserve.frontend.conversation import Conversation, Messages, Variables, of_request
from specserve.frontend.fields import Refusal, Text
from specserve.frontend.generation import Job
from specserve.frontend.output import Answer, Delta
from specserve.frontend.parsers.registry import FORMATS
from specserve.frontend.tools import Calls, NamedFunction, ToolChoice, Tools
from specserve.server.call import Writer, with_prediction
from specserve.server.front import Front
from specserve.server.logprobs import chat_logprobs
from specserve.server.openapi import answers
from specserve.server.parsed import Deltas, ReasoningField, finish_reason, message
from specserve.server.protocol import Count, GenerationRequest, check_stream_options, sampling_params
from specserve.server.schema import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatReason,
)
from specserve.server.streaming import unless_left
from specserve.server.structured import Form, form_grammar, with_grammar

W = TypeVar("W", bound=Writer)


class ChatRequest(GenerationRequest):
    refused: ClassVar[Mapping[str, Refusal]] = {
        **GenerationRequest.refused,
        "functions": Refusal("its newer name is tools", []),
        "function_call": Refusal("its newer name is tool_choice", "none"),
        "audio": Refusal("only text is supported"),
        "modalities": Refusal("only text is supported", ["text"]),
        "verbosity": Refusal("the verbosity of a model can't be set", "medium"),
        "add_generation_prompt": Refusal("the generation prompt is always added", True),
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
    """The newer name of `max_tokens`; if both are given, they must be equal."""
    logprobs: bool | None = None
    """Log-probabilities of the answer's tokens."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Alternatives for each token; only with `logprobs`."""
    chat_template_kwargs: Variables | None = None
    """Variables of the chat template, such as `enable_thinking`. Others are refused unless false or null."""
    reasoning_effort: Text | None = None
    """Only for a chat template that reads it. `none` sets `enable_thinking` to false in `chat_template_kwargs`."""
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    """Maximum number of tokens in a thought; then the mark that ends it is written. Only with `--reasoning-parser`."""
    reasoning_field: ReasoningField | None = None
    """The answer's field for reasoning; `reasoning` is its newer name in vLLM. Default: `reasoning_content`."""
    tools: Tools | None = None
    """Functions that the model may call, if its chat template has a place for them."""
    tool_choice: ToolChoice | None = None
    """`none` leaves the tools out of the prompt; `required` or a function makes the model call. Default: `auto`."""
    parallel_tool_calls: bool | None = None
    """false: the model makes at most one call."""
    safety_identifier: str | None = None
    """A label that changes no answer."""
    prompt_cache_key: str | None = None
    """A label that changes no answer; prompts share cached prefixes without it."""
    metadata: dict[str, str] | None = None
    """Labels that change no answer."""


def add_chat(app: FastAPI, front: Front) -> None:
    @app.post(
        "/v1/chat/completions", response_model=None, responses=answers(ChatCompletion, ChatCompletionChunk)
    )
    async def post_chat(request: ChatRequest, http: Request) -> Response:
        return await unless_left(http.receive, _chat(front, request))


async def _chat(front: Front, request: ChatRequest) -> Response:
    writer = await begin(front, request, _Writer)
    return await writer.respond()


async def begin(front: Front, request: ChatRequest, make: Callable[[Front, ChatRequest, list[Job]], W]) -> W:
    """Check a request and submit its answers. Every API that is translated to chat uses this. ``make`` creates the
    writer of the answers. Raises FieldError and ApiError naming the request's fields."""
    front.check_call(request.model)
    check_stream_options(request)
    params = _params(front, request)
    calls, form = calls_of(front, request), form_grammar(request)
    if calls.tools and form is not None and front.has_tokenizer:
        calls.check(front.calls_format, form[0])
    with front.place(request.choices, "n"):
        messages = of_request(request.messages)
        prompt = await _encode(front, request, calls, messages)
        params = await with_prediction(front, request, params)
        parsers = [front.formats.parser(prompt, calls, form is not None) for _ in range(request.choices)]
        form = _after_thought(front, call_form(front, calls, form), parsers[0])
        params = with_budget(front, request, params, parsers[0])
        params = await with_grammar(form, params, front.no_grammars)
        front.check(prompt, params, "messages")
        jobs = [
            Job(prompt, params, choice, request.streams_runs, parser) for choice, parser in enumerate(parsers)
        ]
        writer = make(front, request, jobs)
        writer.generation.submit()
    return writer


async def _encode(front: Front, request: ChatRequest, calls: Calls, messages: Conversation) -> list[int]:
    """Return the prompt's tokens. Raises FieldError naming ``reasoning_effort`` if the template does not read it."""
    effort, given = request.reasoning_effort, request.chat_template_kwargs or {}
    implied: dict[str, Any] = {}
    if effort is not None:
        implied = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    try:
        return await front.encode_chat(messages, calls.tools, {**implied, **given})
    except FieldError as error:
        if effort is None or error.param != "chat_template_kwargs.reasoning_effort":
            raise
        words = f"not supported: the effort can't be set: {error.reason}"
        raise FieldError("reasoning_effort", words, "unsupported_parameter") from None


def _params(front: Front, request: ChatRequest) -> SamplingParams:
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise FieldError("max_completion_tokens", "must be equal to max_tokens, its older name")
    if request.top_logprobs and not request.logprobs:
        raise FieldError("top_logprobs", "only with logprobs: true")
    return sampling_params(
        request,
        vocab_size=front.vocab_size,
        max_tokens=next(iter(limits), None),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        defaults=front.request_defaults,
    )


def calls_of(front: Front, request: ChatRequest) -> Calls:
    """Return the tools that the model may call and how. Raises FieldError if they can't be used."""
    calls = Calls.of(request.tools, request.tool_choice, request.parallel_tool_calls)
    if front.has_tokenizer:
        calls.check(front.calls_format)
    return calls


def call_form(front: Front, calls: Calls, form: Form | None) -> Form | None:
    """Return the form of the answer: tool calls, the ``form`` that the request gives, or either. None if it is
    unconstrained."""
    if not calls.tools:
        return form
    if form is not None and calls.free:
        return form[0], lambda: str(front.formats.held(calls, form[1]()))
    return (
        None
        if calls.constrained_by is None
        else (calls.constrained_by, lambda: str(front.formats.held(calls)))
    )


def _after_thought(front: Front, form: Form | None, parser: AnswerParser) -> Form | None:
    """Return the form for an answer that may begin with reasoning."""
    if form is None:
        return None
    param, make = form
    return param, lambda: front.formats.after_thought(make(), parser)


def with_budget(
    front: Front, request: ChatRequest, params: SamplingParams, parser: AnswerParser
) -> SamplingParams:
    """Return the parameters with the request's thinking budget. Raises FieldError if budgets are not available."""
    if request.thinking_token_budget is None:
        return params
    if front.no_budgets is not None:
        raise FieldError(
            "thinking_token_budget", f"not supported: {front.no_budgets}", "unsupported_parameter"
        )
    budget, thought = request.thinking_token_budget, front.formats.thought(parser)
    return msgspec.structs.replace(params, thinking_token_budget=budget, thought=thought)


class _Writer(Writer):
    def __init__(self, front: Front, request: ChatRequest, jobs: list[Job]) -> None:
        super().__init__(front, request, jobs, "chatcmpl-")
        self._new_id = (front.calls_format or FORMATS["hermes"]).new_id
        self._top = (request.top_logprobs or 0) if request.logprobs else None
        self._field = request.reasoning_field or "reasoning_content"
        self._named = isinstance(request.tool_choice, NamedFunction)

    async def whole(self) -> ChatCompletion:
        choices = []
        for index, found in enumerate(self.generation.answers):
            said, logprobs = message(found.events, self._new_id, self._field), self._logprobs(found.logprobs)
            ids = self._ids(found.token_ids)
            choices.append(ChatChoice(index, said, logprobs, self._reason(found), ids))
        usage, prompt = self._usage(), self._prompt_ids(0)
        return ChatCompletion(**self._head, choices=choices, usage=usage, prompt_token_ids=prompt)

    async def chunks(self) -> AsyncIterator[ChatCompletionChunk]:
        """Yield for each choice its role, its pieces as they arrive and its finish reason; last the total usage, if
        asked for."""
        begun: dict[int, Deltas] = {}
        async for index, delta in self.generation.deltas():
            if index not in begun:
                begun[index] = Deltas(self._new_id, self._field)
                first = self._chunk(ChatChunkChoice(index, ChatDelta("", "assistant")))
                first.prompt_token_ids = self._prompt_ids(index)
                yield first
            for choice in self._pieces(index, begun[index], delta):
                yield self._chunk(choice)
            if delta.finish_reason:
                reason = self._reason(self.generation.answers[index])
                yield self._chunk(ChatChunkChoice(index, ChatDelta(), finish_reason=reason))
        if self._include_usage:
            yield ChatCompletionChunk(**self._head, choices=[], usage=self._usage())

    def _reason(self, answer: Answer) -> ChatReason:
        """Return the finish reason. As with OpenAI it is not ``tool_calls`` if the request named the function."""
        assert answer.finish_reason is not None, "the answer has ended"
        return answer.finish_reason if self._named else finish_reason(answer)

    def _pieces(self, index: int, deltas: Deltas, delta: Delta) -> Iterator[ChatChunkChoice]:
        """Yield the deltas of one engine message. The first one carries its logprobs, token ids and runs."""
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
