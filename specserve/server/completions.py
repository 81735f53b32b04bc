"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from specserve.core import MAX_LOGPROBS, SamplingParams, TokenLogprob
from specserve.frontend.generation import Job
from specserve.server.errors import ApiError
from specserve.server.front import Front
from specserve.server.logprobs import CompletionLogprobs, token_bytes
from specserve.server.prediction import with_prediction
from specserve.server.protocol import (
    GenerationRequest,
    Int,
    Refusal,
    Text,
    check_stream_options,
    sampling_params,
)
from specserve.server.streaming import Body, answer, stream
from specserve.server.usage import step_runs, usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_ANSWERS = 2048


class CompletionRequest(GenerationRequest):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "echo": Refusal("the prompt is not repeated", False),
        "suffix": Refusal("nothing is inserted before a suffix", ""),
    }
    prompt: Text | list[Int] | Annotated[list[Text] | list[list[Int]], Field(max_length=MAX_ANSWERS)]
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


async def complete(front: Front, request: CompletionRequest, http: Request) -> Response:
    front.check_call(request.model)
    check_stream_options(request)
    if request.best_of not in (None, request.choices):
        raise ApiError(
            400, f"best_of: only the value of n ({request.choices}), found {request.best_of}", "best_of"
        )
    params = _params(front, request)
    given = _prompts(request)
    answers = len(given) * request.choices
    if answers > MAX_ANSWERS:
        raise ApiError(
            400, f"n: {len(given)} prompts by {request.choices} are over {MAX_ANSWERS} answers", "n"
        )
    with front.place(answers):
        prompts = [await front.encode(item) if isinstance(item, str) else item for item in given]
        for prompt in prompts:
            front.check_prompt(prompt, "prompt", params.min_tokens)
        params = await with_prediction(front, request, params)
        writer = _Writer(front, request, prompts, params)
        writer.generation.submit()
    if request.stream:
        return await stream(http, writer.generation, writer.chunks())
    return await answer(http, writer.generation, writer.body)


def _params(front: Front, request: CompletionRequest) -> SamplingParams:
    if request.stop and not front.has_tokenizer:
        raise ApiError(400, "stop: this server runs without a tokenizer; use stop_token_ids", "stop")
    return sampling_params(
        request,
        vocab_size=front.vocab_size,
        max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
        logprobs=request.logprobs,
        default_temperature=front.default_temperature,
    )


def _prompts(request: CompletionRequest) -> Sequence[str | list[int]]:
    """One prompt or several, each text or token ids. Raises ApiError for an empty one."""
    prompt = request.prompt
    several = [prompt] if isinstance(prompt, str) or _are_ids(prompt) else prompt
    if not several or not all(several):
        raise ApiError(400, "prompt: must not be empty", "prompt")
    return several  # type: ignore[return-value]


def _are_ids(prompt: Sequence[object]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


class _Writer:
    """Writes a call's answers in OpenAI's words. Without a tokenizer choices carry ``token_ids``."""

    def __init__(
        self, front: Front, request: CompletionRequest, prompts: list[list[int]], params: SamplingParams
    ) -> None:
        jobs = [
            Job(prompt, params, choice, request.streams_runs)
            for prompt in prompts
            for choice in range(request.choices)
        ]
        self.generation = front.generation(jobs, f"cmpl-{uuid.uuid4().hex}")
        self._request = request
        self._ids = not front.has_tokenizer
        to_bytes = token_bytes(front.tokenizer if front.has_tokenizer else None)
        self._logprobs = [CompletionLogprobs(request.logprobs or 0, to_bytes) for _ in jobs]
        self._head = {
            "id": self.generation.name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": None,
        }

    def body(self) -> Body:
        choices = [
            self._choice(index, found.text, found.token_ids, found.logprobs, found.finish_reason)
            for index, found in enumerate(self.generation.answers)
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[Body]:
        """Text as it comes, with the finish reason beside the last; then the usage of all, if asked for."""
        usage_field = {"usage": None} if self._request.include_usage else {}
        async for index, delta in self.generation.deltas():
            if delta.text or delta.logprobs or delta.finish_reason or self._ids or delta.pieces:
                choice = self._choice(
                    index, delta.text, delta.token_ids, delta.logprobs or [], delta.finish_reason
                )
                if self._request.streams_runs:
                    choice["speculation"] = step_runs(delta)
                yield {**self._head, "choices": [choice], **usage_field}
        if self._request.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _choice(
        self, index: int, text: str, token_ids: list[int], logprobs: list[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        asked = self._request.logprobs is not None
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].format(logprobs) if asked else None,
            "finish_reason": reason,
            **({"token_ids": token_ids} if self._ids else {}),
        }

    def _usage(self) -> Body:
        return usage(self.generation, self._request.return_speculation)
