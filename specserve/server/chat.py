"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import FastAPI, Request
from msgspec import UNSET
from pydantic import Field
from starlette.responses import Response

from specserve.core import MAX_COUNT, MAX_LOGPROBS, FieldError, SamplingParams, TokenLogprob
from specserve.frontend.answers import Form
from specserve.frontend.conversation import Messages, Variables, of_request, turn
from specserve.frontend.fields import Refusal, Text
from specserve.frontend.generation import Job, jobs_of
from specserve.frontend.output import Answer, Delta
from specserve.frontend.parsers.base import Arguments, Call, Content, Event, Reasoning, merged, parts
from specserve.frontend.parsers.objects import is_whole
from specserve.frontend.tools import Calls, NamedFunction, ToolChoice, Tools
from specserve.server.front import Front, Served
from specserve.server.logprobs import chat_logprobs
from specserve.server.openapi import answers
from specserve.server.protocol import Count, GenerationRequest, form_of, sampling_params
from specserve.server.schema import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatReason,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from specserve.server.writer import Writer, unless_left

ReasoningField = Literal["reasoning_content", "reasoning"]
W = TypeVar("W", bound=Writer)


class ChatRequest(GenerationRequest):
    refused: ClassVar[Mapping[str, Refusal]] = {
        **GenerationRequest.refused,
        "functions": Refusal("its newer name is tools", []),
        "function_call": Refusal("its newer name is tool_choice", "none"),
        "audio": Refusal("only text is supported"),
        "modalities": Refusal("only text is supported", ["text"]),
        "verbosity": Refusal("the verbosity of a model can't be set", "medium"),
        "add_special_tokens": Refusal("the chat template writes them", False),
        "stream_reasoning": Refusal("reasoning is streamed as it comes", True),
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
    add_generation_prompt: bool | None = None
    """false: the prompt ends after the last message, and the assistant's turn is not begun."""
    continue_final_message: bool | None = None
    """The answer continues the last message, which is the assistant's; only without `add_generation_prompt` true."""
    reasoning_effort: Text | None = None
    """Only for a chat template that reads it. `none` sets `enable_thinking` to false in `chat_template_kwargs`."""
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    """Maximum number of tokens in a thought; then the mark that ends it is written. Only with `--reasoning-parser`."""
    separate_reasoning: bool | None = None
    """false leaves reasoning in the content (SGLang's)."""
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
    writer = await begin(front, request, _ChatWriter)
    return await writer.respond()


async def begin(front: Front, request: ChatRequest, make: Callable[[Front, ChatRequest, list[Job]], W]) -> W:
    """Check a request and submit its answers. Every API that is translated to chat uses this. ``make`` creates the
    writer of the answers. Raises FieldError and ApiError naming the request's fields."""
    served = front.serving(request.model)
    params, form = _params(served, request), form_of(request)
    calls = calls_of(served, request, form)
    with front.places.reserve(request.choices, "n", served.settings):
        prompt = await _encode(front, served, request, calls)
        params = await front.tokenizing.with_prediction(params, request.prediction, served.capacity)
        assert served.formats is not None, "the prompt was tokenized"
        makes_grammar = form is not None or (calls is not None and calls.constrained_by is not None)
        formats = served.formats
        if request.separate_reasoning is False:
            if makes_grammar or request.thinking_token_budget is not None:
                words = (
                    "false can't be combined with a form of the answer, required calls or a thinking budget"
                )
                raise FieldError("separate_reasoning", words)
            formats = formats.unseparated
        plan = partial(formats.plan, prompt, params, request.choices, calls, form)
        params, parsers = await asyncio.to_thread(plan) if makes_grammar else plan()
        served.capacity.check(prompt, params, "messages")
        writer = make(front, request, jobs_of(prompt, params, parsers, request.streams_runs))
        writer.generation.submit()
    return writer


async def _encode(front: Front, served: Served, request: ChatRequest, calls: Calls | None) -> list[int]:
    """Return the prompt's tokens. Raises FieldError naming ``reasoning_effort`` if the template does not read it."""
    effort, given = request.reasoning_effort, request.chat_template_kwargs or {}
    implied: dict[str, Any] = {}
    if effort is not None:
        implied = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    tools, messages = calls.tools if calls else (), of_request(request.messages)
    ends = turn(messages, request.add_generation_prompt, request.continue_final_message)
    try:
        return await front.tokenizing.encode_chat(
            messages, served.capacity, tools, {**implied, **given}, ends
        )
    except FieldError as error:
        if effort is None or error.param != "chat_template_kwargs.reasoning_effort":
            raise
        words = f"not supported: the effort can't be set: {error.reason}"
        raise FieldError("reasoning_effort", words, "unsupported_parameter") from None


def _params(served: Served, request: ChatRequest) -> SamplingParams:
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise FieldError("max_completion_tokens", "must be equal to max_tokens, its older name")
    if request.top_logprobs and not request.logprobs:
        raise FieldError("top_logprobs", "only with logprobs: true")
    if request.thinking_token_budget is not None and served.no_budgets is not None:
        words = f"not supported: {served.no_budgets}"
        raise FieldError("thinking_token_budget", words, "unsupported_parameter")
    return sampling_params(
        request,
        served.info,
        max_tokens=next(iter(limits), None),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        thinking_token_budget=request.thinking_token_budget,
    )


def calls_of(served: Served, request: ChatRequest, form: Form | None = None) -> Calls | None:
    """Return the tools that the model may call and how; None without any. Raises FieldError if they can't be used, or
    not together with a ``form``."""
    if not request.tools and request.tool_choice is None:
        return None
    calls = Calls.of(request.tools, request.tool_choice, request.parallel_tool_calls)
    if served.formats is not None:
        calls.check(served.formats.calls, form and form.param)
    return calls


def message(events: Sequence[Event], new_id: Callable[[], str], reasoning: ReasoningField) -> AnswerMessage:
    """Return the message of a whole answer. ``new_id`` makes the id of a call; ``reasoning`` is the field's name."""
    found = parts(events)
    calls = [ToolCall(new_id(), CalledFunction(name, arguments)) for name, arguments in found.calls]
    said = AnswerMessage(None if calls and not found.content else found.content, tool_calls=calls or UNSET)
    setattr(said, reasoning, found.reasoning or UNSET)
    return said


def finish_reason(answer: Answer) -> ChatReason:
    """Return ``tool_calls`` for an answer with calls that ended by itself, or by a stop string after the arguments of
    the last one, otherwise its reason."""
    assert answer.finish_reason is not None, "the answer has ended"
    calls = parts(answer.events).calls
    if answer.finish_reason != "stop" or not calls:
        return answer.finish_reason
    return "stop" if answer.stop is not None and not is_whole(calls[-1][1]) else "tool_calls"


class Deltas:
    """Build the stream deltas of a choice."""

    def __init__(self, new_id: Callable[[], str], reasoning: ReasoningField) -> None:
        self._new_id = new_id
        self._renamed = reasoning == "reasoning"
        self._calls = 0

    def of(self, events: Sequence[Event]) -> list[ChatDelta]:
        return [self._delta(event) for event in merged(events)]

    def _delta(self, event: Event) -> ChatDelta:
        match event:
            case Content(text):
                return ChatDelta(text)
            case Reasoning(text):
                return ChatDelta(reasoning=text) if self._renamed else ChatDelta(reasoning_content=text)
            case Call(name):
                self._calls += 1
                delta = ToolCallDelta(self._calls - 1, FunctionDelta("", name), self._new_id(), "function")
                return ChatDelta(tool_calls=[delta])
            case Arguments(text):
                return ChatDelta(tool_calls=[ToolCallDelta(self._calls - 1, FunctionDelta(text))])


class _ChatWriter(Writer):
    def __init__(self, front: Front, request: ChatRequest, jobs: list[Job]) -> None:
        super().__init__(front, request, jobs, "chatcmpl-")
        self._new_id = front.new_call_id
        self._top = (request.top_logprobs or 0) if request.logprobs else None
        self._field = request.reasoning_field or "reasoning_content"
        self._named = isinstance(request.tool_choice, NamedFunction)

    async def whole(self) -> ChatCompletion:
        choices = []
        for index, found in enumerate(self.generation.answers):
            said, logprobs = message(found.events, self._new_id, self._field), self._logprobs(found.logprobs)
            ids = self._ids(found.token_ids)
            choices.append(ChatChoice(index, said, logprobs, self._reason(found), ids))
        usage, prompt, scores = self.usage(), self._prompt_ids(0), await self._prompt_scores(0)
        return ChatCompletion(
            **self._head, choices=choices, usage=usage, prompt_token_ids=prompt, prompt_logprobs=scores
        )

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
        if self._asked.include_usage:
            yield ChatCompletionChunk(**self._head, choices=[], usage=self.usage())

    def _reason(self, answer: Answer) -> ChatReason:
        """Return the finish reason. As with OpenAI it is not ``tool_calls`` if the request named the function."""
        assert answer.finish_reason is not None, "the answer has ended"
        return answer.finish_reason if self._named else finish_reason(answer)

    def _pieces(self, index: int, deltas: Deltas, delta: Delta) -> Iterator[ChatChunkChoice]:
        """Yield the deltas of one engine message. The first one carries its logprobs, token ids and runs."""
        found = deltas.of(delta.events)
        has_ids = self._with_ids and delta.token_ids
        if not found and (delta.logprobs or has_ids or (delta.pieces and self._asked.streams_runs)):
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
        tokenizer = self._front.tokenizing.tokenizer
        return None if self._top is None or tokenizer is None else chat_logprobs(found, self._top, tokenizer)
