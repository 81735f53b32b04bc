"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from pydantic import Field
from starlette.responses import Response

from specserve.core import MAX_LOGPROBS, SamplingParams, TokenLogprob
from specserve.frontend.fields import ListOf, Refusal, Text
from specserve.frontend.generation import Job
from specserve.frontend.output import Answer, Delta
from specserve.server.errors import ApiError
from specserve.server.front import Front
from specserve.server.logprobs import CompletionLogprobs, joined
from specserve.server.prediction import with_prediction
from specserve.server.protocol import (
    MAX_ANSWERS,
    MAX_CHOICES,
    GenerationRequest,
    Int,
    check_stream_options,
    sampling_params,
)
from specserve.server.streaming import Body, answer, stream
from specserve.server.usage import step_runs, usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's

T = TypeVar("T")
Several = Annotated[ListOf[T], Field(max_length=MAX_ANSWERS)]


class CompletionRequest(GenerationRequest):
    refused: ClassVar[Mapping[str, Refusal]] = {
        "suffix": Refusal("nothing is inserted before a suffix", ""),
    }
    prompt: Text | ListOf[Int] | Several[Text] | Several[ListOf[Int]]
    """A prompt or several, as text or token ids; none empty."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Answers that are made, of which the `n` best are sent; at least `n`, in a stream `n`, bounded alike."""
    echo: bool | None = None
    """The answer begins with the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probabilities of the answer's tokens, with this many alternatives for each."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most tokens of an answer, 0 for the prompt alone. Not set: 16."""

    @property
    def candidates(self) -> int:
        """Answers to each prompt, of which ``choices`` are sent."""
        return self.best_of or self.choices


async def complete(front: Front, request: CompletionRequest) -> Response:
    front.check_call(request.model)
    check_stream_options(request)
    _check_best_of(request)
    params = _params(front, request)
    given = _prompts(request)
    answers = len(given) * request.candidates
    name = "prompt" if request.candidates == 1 else "n" if request.best_of is None else "best_of"
    if answers > MAX_ANSWERS:
        message = f"{name}: {len(given)} prompts by {request.candidates} are over {MAX_ANSWERS} answers"
        raise ApiError(400, message, name)
    with front.place(answers, name):
        params = await with_prediction(front, request, params)
        prompts = [await _Prompt.of(front, item, name, params, request.echo) for name, item in given.items()]
        writer = _Writer(front, request, prompts, params)
        writer.generation.submit()
    if request.stream:
        return await stream(writer.generation, writer.chunks())
    return await answer(writer.generation, writer.body)


def _check_best_of(request: CompletionRequest) -> None:
    if request.candidates < request.choices:
        message = f"best_of: at least n, which is {request.choices}, found {request.best_of}"
        raise ApiError(400, message, "best_of")
    if request.stream and request.candidates > request.choices:
        message = f"best_of: only the value of n ({request.choices}) in a stream, found {request.best_of}"
        raise ApiError(400, message, "best_of")


def _params(front: Front, request: CompletionRequest) -> SamplingParams:
    if request.stop and not front.has_tokenizer:
        raise ApiError(400, "stop: this server runs without a tokenizer; use stop_token_ids", "stop")
    return sampling_params(
        request,
        vocab_size=front.vocab_size,
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=0 if request.logprobs is None and request.candidates > request.choices else request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
        default_temperature=front.default_temperature,
    )


def _prompts(request: CompletionRequest) -> dict[str, str | list[int]]:
    """One prompt or several, each text or token ids, by what to call them. Raises ApiError for an empty one."""
    prompt = request.prompt
    one = not prompt or isinstance(prompt, str) or isinstance(prompt[0], int)
    several: dict[str, Any] = (
        {"prompt": prompt} if one else {f"prompt.{i}": item for i, item in enumerate(prompt)}
    )
    for param, item in several.items():
        if not item:
            raise ApiError(400, f"{param}: must not be empty", param)
    return several


@dataclass(frozen=True, slots=True)
class _Prompt:
    """``text``: what ``echo`` repeats, empty without it and without a tokenizer."""

    tokens: list[int]
    text: str

    @classmethod
    async def of(
        cls, front: Front, given: str | list[int], param: str, params: SamplingParams, echo: bool | None
    ) -> _Prompt:
        """Raises FieldError, which calls the prompt ``param``, for one that the engine would refuse."""
        tokens = await front.encode(given, param) if isinstance(given, str) else given
        front.check(tokens, params, param)
        if not echo:
            return cls(tokens, "")
        if isinstance(given, str):
            return cls(tokens, given)
        return cls(tokens, await front.decode(tokens, param) if front.has_tokenizer else "")


class _Choice:
    """Writes one choice, piece by piece. Without a tokenizer it carries ``token_ids``."""

    def __init__(self, front: Front, request: CompletionRequest, prompt: _Prompt, index: int) -> None:
        self._prompt = prompt
        self._index = index
        self._ids = not front.has_tokenizer
        self._logprobs = _logprobs(front, request, prompt)

    def piece(
        self, text: str, token_ids: list[int], logprobs: list[TokenLogprob], reason: str | None
    ) -> Body:
        found = None if self._logprobs is None else self._logprobs.format(logprobs)
        return self._body(text, token_ids, found, reason)

    def prompt(self, logprobs: Body | None) -> Body:
        """What ``echo`` puts before the answer."""
        return self._body(self._prompt.text, self._prompt.tokens, logprobs, None)

    def whole(self, answer: Answer, before: Body | None) -> Body:
        """The answer, after what ``echo`` puts before it."""
        found = self.piece(answer.text, answer.token_ids, answer.logprobs, answer.finish_reason)
        return found if before is None else _after(before, found)

    def _body(self, text: str, token_ids: list[int], logprobs: Body | None, reason: str | None) -> Body:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            **({"token_ids": token_ids} if self._ids else {}),
        }


def _logprobs(front: Front, request: CompletionRequest, prompt: _Prompt) -> CompletionLogprobs | None:
    """What writes the logprobs of a prompt or of an answer to it, None if none are asked for."""
    if request.logprobs is None:
        return None
    tokenizer = front.tokenizer if front.has_tokenizer else None
    return CompletionLogprobs(request.logprobs, tokenizer, len(prompt.text), prompt.tokens)


def _after(before: Body, found: Body) -> Body:
    """A choice that begins with another's text."""
    both: Body = {name: before[name] + found[name] for name in ("text", "token_ids") if name in found}
    if found["logprobs"] is not None:
        both["logprobs"] = joined(before["logprobs"], found["logprobs"])
    return {**found, **both}


class _Writer:
    """Writes a call's answers in OpenAI's words."""

    def __init__(
        self, front: Front, request: CompletionRequest, prompts: list[_Prompt], params: SamplingParams
    ) -> None:
        self._request = request
        self._prompts = prompts
        self._front = front
        self._ids = not front.has_tokenizer
        self._scores: dict[int, Body] = {}  # by prompt: their logprobs as they are written
        unscored = msgspec.structs.replace(params, prompt_logprobs=None)
        jobs = [
            Job(prompt.tokens, unscored if choice else params, choice, request.streams_runs)
            for prompt in prompts
            for choice in range(request.candidates)
        ]
        self.generation = front.generation(jobs, f"cmpl-{uuid.uuid4().hex}")
        self._head = {
            "id": self.generation.name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": None,
        }

    async def body(self) -> Body:
        choices: list[Body] = []
        for prompt in range(len(self._prompts)):
            scores = await self._prompt_logprobs(prompt)
            for best in _best(self._answers(prompt), self._request.choices):
                choice = self._choice(prompt, len(choices))
                before = choice.prompt(scores) if self._request.echo else None
                choices.append(choice.whole(best, before))
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[Body]:
        """Text as it comes, the prompt first if it is to be repeated, with the finish reason with the last; then the
        usage of all, if asked for."""
        writers: dict[int, _Choice] = {}
        async for index, delta in self._deltas():
            if (writer := writers.get(index)) is None:
                prompt = index // self._request.candidates
                writer = writers[index] = self._choice(prompt, index)
                if self._request.echo:
                    yield self._chunk(writer.prompt(await self._prompt_logprobs(prompt)))
            if delta.text or delta.logprobs or delta.finish_reason or self._ids or delta.pieces:
                choice = writer.piece(delta.text, delta.token_ids, delta.logprobs or [], delta.finish_reason)
                if self._request.streams_runs:
                    choice["speculation"] = step_runs(delta)
                yield self._chunk(choice)
        if self._request.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Those of all jobs. A prompt is scored by its first one: where scores are written the others wait for it."""
        count = self._request.candidates
        late: dict[int, list[tuple[int, Delta]]] = (
            {first: [] for first in range(0, len(self.generation.jobs), count)} if self._scored else {}
        )
        async for index, delta in self.generation.deltas():
            first = index - index % count
            if index != first and first in late:
                late[first].append((index, delta))
                continue
            yield index, delta
            for waited in late.pop(first, ()):
                yield waited

    @property
    def _scored(self) -> bool:
        return bool(self._request.echo) and self._request.logprobs is not None

    async def _prompt_logprobs(self, index: int) -> Body | None:
        """Of a prompt that is repeated, written once for all its choices. That takes long for a long one: the event
        loop goes on meanwhile."""
        if self._scored and index not in self._scores:
            self._scores[index] = await asyncio.to_thread(self._write_prompt_logprobs, index)
        return self._scores.get(index)

    def _write_prompt_logprobs(self, index: int) -> Body:
        prompt = self._prompts[index]
        logprobs = _logprobs(self._front, self._request, prompt)
        assert logprobs is not None
        return logprobs.prompt(prompt.text, prompt.tokens, self._answers(index)[0].prompt_logprobs)

    def _answers(self, prompt: int) -> list[Answer]:
        count = self._request.candidates
        return self.generation.answers[prompt * count : (prompt + 1) * count]

    def _choice(self, prompt: int, index: int) -> _Choice:
        return _Choice(self._front, self._request, self._prompts[prompt], index)

    def _chunk(self, choice: Body) -> Body:
        usage_field = {"usage": None} if self._request.include_usage else {}
        return {**self._head, "choices": [choice], **usage_field}

    def _usage(self) -> Body:
        return usage(self.generation, self._request.return_speculation)


def _best(answers: Sequence[Answer], count: int) -> Sequence[Answer]:
    """The answers with the highest log-probability a token, best first; all of them as they are."""
    if count == len(answers):
        return answers
    return sorted(answers, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(answer: Answer) -> float:
    found = [item.logprob for item in answer.logprobs]
    return sum(found) / max(len(found), 1)
