"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.responses import Response

from specserve.core import MAX_LOGPROBS, SamplingParams, TokenLogprob
from specserve.frontend.fields import Refusal, Strict
from specserve.frontend.generation import Generation, Job
from specserve.frontend.output import Delta
from specserve.server.errors import ApiError
from specserve.server.front import Front
from specserve.server.logprobs import chat_logprobs, token_bytes
from specserve.server.messages import Messages, conversation
from specserve.server.prediction import with_prediction
from specserve.server.protocol import (
    Count,
    GenerationRequest,
    check_stream_options,
    sampling_params,
)
from specserve.server.streaming import Body, answer, stream
from specserve.server.usage import step_runs, usage

_NO_TOOLS = "this server calls no tools"


class ResponseFormat(Strict):
    type: Literal["text"]
    """Plain text."""


class ChatRequest(GenerationRequest):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "tools": Refusal(_NO_TOOLS, []),
        "tool_choice": Refusal(_NO_TOOLS, "none"),
        "parallel_tool_calls": Refusal(_NO_TOOLS, True, False),
        "functions": Refusal(_NO_TOOLS, []),
        "function_call": Refusal(_NO_TOOLS, "none"),
        "audio": Refusal("text alone"),
        "modalities": Refusal("text alone", ["text"]),
        "reasoning_effort": Refusal("the effort of a model can't be set"),
        "verbosity": Refusal("the verbosity of a model can't be set"),
        "web_search_options": Refusal("there is no web search"),
        "moderation": Refusal("nothing is moderated"),
        "store": Refusal("nothing is stored", False),
        "metadata": Refusal("nothing is stored", {}),
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
    response_format: ResponseFormat | None = None
    """Plain text."""
    safety_identifier: str | None = None
    """A label that changes no answer."""
    prompt_cache_key: str | None = None
    """A label that changes no answer; prompts share cached prefixes without it."""


async def chat(front: Front, request: ChatRequest) -> Response:
    front.check_call(request.model)
    check_stream_options(request)
    params = _params(front, request)
    with front.place(request.choices, "n"):
        prompt = await front.encode_chat(conversation(request.messages))
        params = await with_prediction(front, request, params)
        front.check(prompt, params, "messages")
        jobs = [Job(prompt, params, choice, request.streams_runs) for choice in range(request.choices)]
        writer = _Writer(front, request, jobs)
        writer.generation.submit()
    if request.stream:
        return await stream(writer.generation, writer.chunks())
    return await answer(writer.generation, writer.body)


def _params(front: Front, request: ChatRequest) -> SamplingParams:
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(
            400, "max_completion_tokens: differs from max_tokens, its older name", "max_completion_tokens"
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs: true", "top_logprobs")
    return sampling_params(
        request,
        vocab_size=front.vocab_size,
        max_tokens=next(iter(limits), None),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        default_temperature=front.default_temperature,
    )


class _Writer:
    """Writes a call's answers in OpenAI's words."""

    def __init__(self, front: Front, request: ChatRequest, jobs: list[Job]) -> None:
        self.generation: Generation = front.generation(jobs, f"chatcmpl-{uuid.uuid4().hex}")
        self._request = request
        self._to_bytes = token_bytes(front.tokenizer)
        self._head = {
            "id": self.generation.name,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": None,
        }

    async def body(self) -> Body:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": found.text, "refusal": None},
                "logprobs": self._logprobs(found.logprobs),
                "finish_reason": found.finish_reason,
            }
            for index, found in enumerate(self.generation.answers)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[Body]:
        """Per choice: the role, text as it comes, the finish reason; then the usage of all, if asked for."""
        begun: set[int] = set()
        async for index, delta in self.generation.deltas():
            if index not in begun:
                begun.add(index)
                yield self._chunk(index, {"role": "assistant", "content": ""})
            if delta.text or delta.logprobs or delta.pieces:
                yield self._chunk(index, {"content": delta.text}, delta)
            if delta.finish_reason:
                yield self._chunk(index, {}, finish_reason=delta.finish_reason)
        if self._request.include_usage:
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage()}

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        delta: Delta | None = None,
        finish_reason: str | None = None,
    ) -> Body:
        choice = {
            "index": index,
            "delta": content,
            "logprobs": self._logprobs(delta.logprobs or []) if delta else None,
            "finish_reason": finish_reason,
            **({"speculation": step_runs(delta)} if delta and self._request.streams_runs else {}),
        }
        usage_field = {"usage": None} if self._request.include_usage else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **usage_field}

    def _logprobs(self, found: list[TokenLogprob]) -> Body | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(found, self._request.top_logprobs or 0, self._to_bytes)

    def _usage(self) -> Body:
        return usage(self.generation, self._request.return_speculation)
