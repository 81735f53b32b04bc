"""Code that all generation endpoints share: predictions, and the writing of answers."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from specserve.core import FieldError, SamplingParams, SpeculationUsage, prediction_limit
from specserve.frontend.conversation import joined
from specserve.frontend.generation import Generation, Job
from specserve.frontend.output import Answer, Delta
from specserve.frontend.tokenizer import TooLong
from specserve.server.errors import ApiError
from specserve.server.front import Front
from specserve.server.protocol import GenerationRequest
from specserve.server.schema import CachedTokens, CompletionTokens, Runs, SpeculationTotals, Usage
from specserve.server.streaming import Json, stream


async def with_prediction(front: Front, request: GenerationRequest, params: SamplingParams) -> SamplingParams:
    """Return the parameters with the token ids of the request's prediction. Raises FieldError if there is no room for
    it."""
    if request.prediction is None:
        return params
    if not front.has_tokenizer:
        raise FieldError("prediction", "this server runs without a tokenizer")
    most = prediction_limit(front.context_length)
    try:
        tokens = await front.encode_answer(joined(request.prediction.content), most)
    except TooLong as error:
        raise FieldError("prediction", f"{error}; the limit is {most}") from None
    return msgspec.structs.replace(params, prediction=tokens)


class Writer(ABC):
    """Write the answers of a call. ``named_events``: the chunks of a stream are named events. ``prefix`` begins its
    id."""

    named_events: ClassVar[bool] = False

    def __init__(self, front: Front, request: GenerationRequest, jobs: Sequence[Job], prefix: str) -> None:
        self.generation: Generation = front.generation(jobs, f"{prefix}{uuid.uuid4().hex}")
        self._front = front
        self._head: dict[str, Any] = {
            "id": self.generation.name,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": front.engine.info.get("system_fingerprint"),
        }
        self._include_usage = request.include_usage
        self._continuous_usage = request.continuous_usage
        self._return_speculation = request.return_speculation
        self._return_prompt_ids = bool(request.return_token_ids)
        self._with_ids = self._return_prompt_ids or not front.has_tokenizer
        self._streams = request.stream
        self._streams_runs = request.streams_runs

    async def respond(self) -> Response:
        """Return the answer, after the jobs were submitted. Cancelling it aborts the jobs that have not ended."""
        if self._streams:
            return await stream(self.generation, self.chunks(), self.failed, self.named_events)
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

    def _ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        """Return token ids, if they were asked for or there is no text."""
        return token_ids if self._with_ids else UNSET

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        """Return the token ids of a choice's prompt, if they were asked for."""
        return list(self.generation.jobs[index].prompt) if self._return_prompt_ids else UNSET

    def _runs(self, delta: Delta) -> Runs | UnsetType:
        """Return which tokens of a chunk came from which step, if asked for."""
        if not self._streams_runs:
            return UNSET
        return Runs(delta.runs, UNSET if delta.pieces is None else delta.pieces)

    def _usage(self) -> Usage:
        """Return the usage of all choices. A prompt and its cached tokens count once, not once per choice."""
        jobs, answers = self.generation.jobs, self.generation.answers
        firsts = [(job, answer) for job, answer in zip(jobs, answers, strict=True) if job.choice == 0]
        return self._counted(firsts, jobs, answers)

    def _usage_of_chunk(self, index: int) -> Usage | UnsetType | None:
        """Return the ``usage`` of a choice's chunk: the choice's tokens so far, if continuous usage was asked for."""
        if not self._continuous_usage:
            return None if self._include_usage else UNSET
        job, answer = self.generation.jobs[index], self.generation.answers[index]
        return self._counted([(job, answer)], [job], [answer])

    def _counted(
        self, firsts: Sequence[tuple[Job, Answer]], jobs: Sequence[Job], answers: Sequence[Answer]
    ) -> Usage:
        """Return the usage of the prompts of ``firsts`` and of ``answers``."""
        prompt = sum(len(job.prompt) for job, _ in firsts)
        completion = sum(len(answer.token_ids) for answer in answers)
        return Usage(
            prompt,
            completion,
            prompt + completion,
            CachedTokens(sum(answer.cached_tokens for _, answer in firsts)),
            _details(jobs, answers),
            _speculation(answers) if self._return_speculation else UNSET,
        )


def _details(jobs: Sequence[Job], answers: Sequence[Answer]) -> CompletionTokens:
    """Return accepted and rejected prediction tokens (0 without one) and reasoning tokens, over all choices."""
    pairs = list(zip(jobs, answers, strict=True))
    given = [(len(job.params.prediction), each) for job, each in pairs if job.params.prediction is not None]
    accepted = sum(each.speculation.predicted for _, each in given)
    found = CompletionTokens(accepted, sum(size for size, _ in given) - accepted)
    told = [each for job, each in pairs if job.parser is not None and job.parser.tells_reasoning]
    if told:
        found.reasoning_tokens = sum(each.reasoning_tokens for each in told)
    return found


def _speculation(answers: Sequence[Answer]) -> SpeculationTotals:
    total = SpeculationUsage(
        steps=sum(answer.speculation.steps for answer in answers),
        drafted=sum(answer.speculation.drafted for answer in answers),
        accepted=sum(answer.speculation.accepted for answer in answers),
    )
    return SpeculationTotals(total.steps, total.drafted, total.accepted, total.mean_accepted_length)
