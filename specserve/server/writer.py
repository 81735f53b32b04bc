"""Write the answers of a call, as JSON or as server-sent events, and stop when the client has left."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from specserve.core import FieldError, SpeculationUsage
from specserve.frontend.generation import Generation, Job, RequestFailed
from specserve.frontend.output import Answer, Delta
from specserve.server import schema
from specserve.server.errors import ApiError, as_answer
from specserve.server.front import Front
from specserve.server.logprobs import prompt_logprobs
from specserve.server.protocol import GenerationRequest

T = TypeVar("T")

HEADERS_AFTER = 1.0  # seconds that a stream waits for its first tokens
SILENCE = 10.0  # seconds without a chunk after which a comment keeps a stream's connection alive
CLIENT_LEFT = 499  # nginx's status; not sent to anyone, but counted in the metrics
ENDED_BY = "specserve.ended_by"  # in the scope: the status of the error that ended a stream
_DONE = b"data: [DONE]\n\n"
WRITERS: ContextVar[list[Writer]] = ContextVar("writers")  # of the HTTP request being answered


class Json(Response):
    """Answer with a struct of ``schema`` as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class Writer(ABC):
    """Write the answers of a call. ``named_events``: the chunks of a stream are named events. ``prefix`` begins its
    id."""

    named_events: ClassVar[bool] = False

    def __init__(self, front: Front, request: GenerationRequest, jobs: Sequence[Job], prefix: str) -> None:
        name = request.rid or f"{prefix}{request.request_id or uuid.uuid4().hex}"
        if (request.rid or request.request_id) and front.engine.has_call(name):
            field = "rid" if request.rid else "request_id"
            raise FieldError(field, "another request that has not ended has this id")
        self.generation: Generation = front.generation(jobs, name, request.cache_salt or "")
        self._front = front
        self._head: dict[str, Any] = {
            "id": self.generation.name,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": front.engine.ready and front.engine.ready.info.system_fingerprint,
        }
        self._asked = request
        self._with_ids = request.return_token_ids or front.tokenizing.tokenizer is None
        WRITERS.get([]).append(self)

    def summary(self) -> str:
        """Tell what was generated, without its content."""
        usage, answers = self.usage(), self.generation.answers
        speculation, first = _speculation(answers), self.generation.first_token
        return ", ".join(
            [
                f"model {self._head['model']}" + (", streamed" if self._asked.stream else ""),
                f"{usage.prompt_tokens} prompt tokens, {usage.prompt_tokens_details.cached_tokens} cached",
                f"{usage.completion_tokens} tokens",
                *([] if first is None else [f"first after {first:.3f} s"]),
                *([f"{speculation.mean_accepted_length:.2f} tokens a step"] if speculation.drafted else []),
                "/".join(answer.finish_reason or "unfinished" for answer in answers),
            ]
        )

    def attributes(self) -> dict[str, Any]:
        """Return what a span tells of the call, without its content, under the names of vLLM and OpenTelemetry."""
        generation, usage = self.generation, self.usage()
        params = generation.jobs[0].params
        found = {
            "request.id": generation.name,
            "request.model": self._head["model"],
            "request.n": 1 + max(job.choice for job in generation.jobs),
            "request.max_tokens": params.max_tokens,
            "request.temperature": params.temperature,
            "request.top_p": params.top_p,
            "response.finish_reasons": [
                answer.finish_reason or "unfinished" for answer in generation.answers
            ],
            "usage.prompt_tokens": usage.prompt_tokens,
            "usage.completion_tokens": usage.completion_tokens,
            "usage.input_tokens": usage.prompt_tokens,
            "usage.output_tokens": usage.completion_tokens,
            "usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
            **{f"latency.{name}": seconds for name, seconds in generation.durations.items()},
        }
        return {f"gen_ai.{name}": value for name, value in found.items() if value is not None}

    async def respond(self) -> Response:
        """Return the answer, after the jobs were submitted. Cancelling it aborts the jobs that have not ended."""
        if self._asked.stream:
            return await _EventStream.begun(self)
        try:
            await self.generation.run()
        finally:
            self.generation.close()
        return Json(await self.whole())

    @abstractmethod
    async def whole(self) -> msgspec.Struct:
        """Return the complete answer, after the jobs have ended."""

    @abstractmethod
    def chunks(self) -> AsyncIterator[msgspec.Struct]:
        """Yield the answer as it arrives."""

    def failed(self, error: ApiError) -> msgspec.Struct:
        """Return the last chunk of a stream that an error ends."""
        return error.body

    async def _prompt_scores(self, index: int) -> schema.PromptLogprobs | UnsetType:
        """Return the log-probabilities of a choice's prompt, if they were asked for. A long prompt takes long."""
        if self._asked.prompt_logprobs is None:
            return UNSET
        found, tokenizer = self.generation.answers[index].prompt_logprobs, self._front.tokenizing.tokenizer
        return await asyncio.to_thread(prompt_logprobs, found, self._asked.prompt_logprobs, tokenizer)

    def _ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        """Return token ids, if they were asked for or there is no text."""
        return token_ids if self._with_ids else UNSET

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        """Return the token ids of a choice's prompt, if they were asked for."""
        return list(self.generation.jobs[index].prompt) if self._asked.return_token_ids else UNSET

    def _runs(self, delta: Delta) -> schema.Runs | UnsetType:
        """Return which tokens of a chunk came from which step, if asked for."""
        if not self._asked.streams_runs:
            return UNSET
        return schema.Runs(delta.runs, UNSET if delta.pieces is None else delta.pieces)

    def usage(self) -> schema.Usage:
        """Return the usage of all choices. A prompt and its cached tokens count once, not once per choice."""
        jobs, answers = self.generation.jobs, self.generation.answers
        firsts = [(job, answer) for job, answer in zip(jobs, answers, strict=True) if job.choice == 0]
        return self._counted(firsts, jobs, answers)

    def _usage_of_chunk(self, index: int) -> schema.Usage | UnsetType | None:
        """Return the ``usage`` of a choice's chunk: the choice's tokens so far, if continuous usage was asked for."""
        if not self._asked.continuous_usage:
            return None if self._asked.include_usage else UNSET
        job, answer = self.generation.jobs[index], self.generation.answers[index]
        return self._counted([(job, answer)], [job], [answer])

    def _counted(
        self, firsts: Sequence[tuple[Job, Answer]], jobs: Sequence[Job], answers: Sequence[Answer]
    ) -> schema.Usage:
        """Return the usage of the prompts of ``firsts`` and of ``answers``."""
        prompt = sum(len(job.prompt) for job, _ in firsts)
        completion = sum(len(answer.token_ids) for answer in answers)
        return schema.Usage(
            prompt,
            completion,
            prompt + completion,
            schema.CachedTokens(sum(answer.cached_tokens for _, answer in firsts)),
            _details(jobs, answers),
            _speculation(answers) if self._asked.return_speculation else UNSET,
        )


def _details(jobs: Sequence[Job], answers: Sequence[Answer]) -> schema.CompletionTokens:
    """Return accepted and rejected prediction tokens (0 without one) and reasoning tokens, over all choices."""
    pairs = list(zip(jobs, answers, strict=True))
    given = [(len(job.params.prediction), each) for job, each in pairs if job.params.prediction is not None]
    accepted = sum(each.speculation.predicted for _, each in given)
    found = schema.CompletionTokens(accepted, sum(size for size, _ in given) - accepted)
    told = [each for job, each in pairs if job.parser is not None and job.parser.tells_reasoning]
    if told:
        found.reasoning_tokens = sum(each.reasoning_tokens for each in told)
    return found


def _speculation(answers: Sequence[Answer]) -> schema.SpeculationTotals:
    total = SpeculationUsage(
        steps=sum(answer.speculation.steps for answer in answers),
        drafted=sum(answer.speculation.drafted for answer in answers),
        accepted=sum(answer.speculation.accepted for answer in answers),
    )
    return schema.SpeculationTotals(total.steps, total.drafted, total.accepted, total.mean_accepted_length)


class ClientLeft(ApiError):
    """The client closed the connection, or it was cut because the client stopped reading."""

    def __init__(self) -> None:
        super().__init__(CLIENT_LEFT, "the client has left")


class _EventStream(Response):
    """Stream the chunks of a writer. Named ones are tagged structs, whose tags name the events, and the last one ends
    the stream; otherwise ``[DONE]`` does."""

    media_type = "text/event-stream"

    def __init__(self, writer: Writer) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._writer = writer
        self._event = _named_event if writer.named_events else _event
        self._end = b"" if writer.named_events else _DONE
        self._sent = 0.0  # when something was sent last

    @classmethod
    async def begun(cls, writer: Writer) -> _EventStream:
        """Wait for the first tokens, but not for long: until then a refusal has its own HTTP status, and a load
        balancer may ask another server."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEADERS_AFTER):
                    await writer.generation.start()
        except BaseException:
            writer.generation.close()
            raise
        return cls(writer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientLeft):
                await unless_left(receive, self._send_all(scope, send))
        finally:
            self._writer.generation.close()

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment whenever nothing else was sent for a while."""
        while True:
            if (left := self._sent + SILENCE - time.monotonic()) > 0:
                await asyncio.sleep(left)
            else:
                self._sent = time.monotonic()
                await send(_body(b": waiting\n\n"))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent = time.monotonic()
        waiting = asyncio.create_task(self._keep_alive(send))
        try:
            async for chunk in self._writer.chunks():
                self._sent = time.monotonic()
                await send(_body(self._event(chunk)))
        except Exception as failure:
            error = as_answer(failure)
            scope[ENDED_BY] = error.status
            await send(_body(self._event(self._writer.failed(error))))
            if not isinstance(failure, RequestFailed):
                waiting.cancel()
                await send(self._last)
                raise  # to be logged
        finally:
            waiting.cancel()
        await send(self._last)

    @property
    def _last(self) -> Message:
        return {"type": "http.response.body", "body": self._end, "more_body": False}


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _named_event(chunk: msgspec.Struct) -> bytes:
    return f"event: {chunk.__struct_config__.tag}\n".encode() + _event(chunk)


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. If the client leaves first, cancel the work and raise ClientLeft."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
