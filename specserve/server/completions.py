"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import FastAPI, Request
from msgspec import UNSET
from pydantic import Field
from starlette.responses import Response

from specserve.core import MAX_CHOICES, MAX_LOGPROBS, Capacity, FieldError, SamplingParams
from specserve.frontend.answers import constrained
from specserve.frontend.fields import ListOf, Refusal, Text
from specserve.frontend.generation import jobs_of
from specserve.frontend.output import Answer, Delta
from specserve.server import schema
from specserve.server.front import Front, Served, Tokenizing
from specserve.server.logprobs import CompletionLogprobs, joined
from specserve.server.openapi import answers
from specserve.server.protocol import MAX_ANSWERS, GenerationRequest, Int, form_of, sampling_params
from specserve.server.schema import Completion, CompletionChoice
from specserve.server.writer import Writer, unless_left

DEFAULT_MAX_TOKENS = 16  # OpenAI's

T = TypeVar("T")
Several = Annotated[ListOf[T], Field(max_length=MAX_ANSWERS)]


class CompletionRequest(GenerationRequest):
    refused: ClassVar[Mapping[str, Refusal]] = {
        **GenerationRequest.refused,
        "suffix": Refusal("insertion before a suffix is not available", ""),
    }
    prompt: Text | ListOf[Int] | Several[Text] | Several[ListOf[Int]]
    """One prompt or several, as text or token ids; none may be empty."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Answers to generate; the `n` best are sent. At least `n`, in a stream exactly `n`; the same limit."""
    echo: bool | None = None
    """The answer begins with the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probabilities of the answer's tokens, with this many alternatives for each."""
    add_special_tokens: bool | None = None
    """false: a prompt of text gets no special tokens from the tokenizer, such as one that begins it."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of tokens in an answer, 0 for the prompt alone. Default: 16."""

    @property
    def candidates(self) -> int:
        """Return the number of answers generated for each prompt, of which ``choices`` are sent."""
        return self.best_of or self.choices


def add_completions(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions", response_model=None, responses=answers(Completion, Completion))
    async def post_completions(request: CompletionRequest, http: Request) -> Response:
        return await unless_left(http.receive, _complete(front, request))


async def _complete(front: Front, request: CompletionRequest) -> Response:
    served = front.serving(request.model)
    params = _params(served, request)
    _check_best_of(request)
    given, form = _prompts(request), form_of(request)
    count = len(given) * request.candidates
    name = "prompt" if request.candidates == 1 else "n" if request.best_of is None else "best_of"
    if count > MAX_ANSWERS:
        words = f"{len(given)} prompts with {request.candidates} answers each exceed the limit of {MAX_ANSWERS} answers"
        raise FieldError(name, words)
    with front.places.reserve(count, name, served.settings):
        params = await front.tokenizing.with_prediction(params, request.prediction, served.capacity)
        if form is not None:
            params = await asyncio.to_thread(constrained, params, form, served.no_grammars)
        prompts = [
            await _Prompt.of(front.tokenizing, item, name, served.capacity, params, request)
            for name, item in given.items()
        ]
        writer = _CompletionWriter(front, request, prompts, params)
        writer.generation.submit()
    return await writer.respond()


def _check_best_of(request: CompletionRequest) -> None:
    if request.candidates < request.choices:
        raise FieldError("best_of", f"must be at least n ({request.choices}), found {request.best_of}")
    if request.stream and request.candidates > request.choices:
        words = f"must equal n ({request.choices}) in a stream, found {request.best_of}"
        raise FieldError("best_of", words)


def _params(served: Served, request: CompletionRequest) -> SamplingParams:
    if served.formats is None:
        _check_textless(request)
    return sampling_params(
        request,
        served.info,
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=0 if request.logprobs is None and request.candidates > request.choices else request.logprobs,
        echoed_logprobs=request.logprobs if request.echo else None,
    )


def _check_textless(request: CompletionRequest) -> None:
    """Raise FieldError for parameters that need text, which a server without a tokenizer lacks."""
    if request.stop:
        raise FieldError("stop", "this server runs without a tokenizer; use stop_token_ids")
    for name, asked in (
        ("skip_special_tokens", request.skip_special_tokens is False),
        ("include_stop_str_in_output", request.include_stop_str_in_output),
    ):
        if asked:
            raise FieldError(name, "this server runs without a tokenizer, so answers have no text")


def _prompts(request: CompletionRequest) -> dict[str, str | list[int]]:
    """Return the prompts by the names that errors use. Each is text or token ids. Raises FieldError for an empty
    one."""
    prompt = request.prompt
    one = not prompt or isinstance(prompt, str) or isinstance(prompt[0], int)
    several: dict[str, Any] = (
        {"prompt": prompt} if one else {f"prompt.{i}": item for i, item in enumerate(prompt)}
    )
    for param, item in several.items():
        if not item:
            raise FieldError(param, "must not be empty")
    return several


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt. ``text`` is what ``echo`` repeats; empty without ``echo`` or without a tokenizer."""

    tokens: list[int]
    text: str

    @classmethod
    async def of(
        cls,
        tokenizing: Tokenizing,
        given: str | list[int],
        param: str,
        capacity: Capacity,
        params: SamplingParams,
        request: CompletionRequest,
    ) -> _Prompt:
        """Encode a prompt. Raises FieldError, with the prompt called ``param``, if the engine would refuse it."""
        special = request.add_special_tokens is not False
        tokens = await tokenizing.encode(given, param, capacity, special) if isinstance(given, str) else given
        capacity.check(tokens, params, param)
        if not request.echo:
            return cls(tokens, "")
        if isinstance(given, str):
            return cls(tokens, given)
        return cls(tokens, await tokenizing.decode(tokens, param, capacity) if tokenizing.tokenizer else "")


def _after(before: CompletionChoice, found: CompletionChoice) -> CompletionChoice:
    """Return the choice with another one's text, logprobs and token ids before its own."""
    logprobs, token_ids = found.logprobs, found.token_ids
    if logprobs is not None and before.logprobs is not None:
        logprobs = joined(before.logprobs, logprobs)
    if token_ids is not UNSET and before.token_ids is not UNSET:
        token_ids = before.token_ids + token_ids
    return CompletionChoice(found.index, before.text + found.text, logprobs, found.finish_reason, token_ids)


class _CompletionWriter(Writer):
    def __init__(
        self, front: Front, request: CompletionRequest, prompts: list[_Prompt], params: SamplingParams
    ) -> None:
        parsers = [None] * request.candidates
        jobs = [
            job for each in prompts for job in jobs_of(each.tokens, params, parsers, request.streams_runs)
        ]
        super().__init__(front, request, jobs, "cmpl-")
        self._request = request
        self._prompts = prompts
        self._begun: set[int] = set()  # choices of a stream that have sent a chunk
        self._written: dict[int, schema.CompletionLogprobs] = {}  # by prompt: its formatted logprobs

    async def whole(self) -> Completion:
        choices: list[CompletionChoice] = []
        for prompt in range(len(self._prompts)):
            for best in _best(self._answers(prompt), self._request.choices):
                index = len(choices)
                found = self._piece(index, self._scores_of(prompt), best)
                if self._request.echo:
                    found = _after(await self._repeat(prompt, index), found)
                found.prompt_token_ids = self._prompt_ids(prompt * self._request.candidates)
                found.prompt_logprobs = await self._prompt_scores(prompt * self._request.candidates)
                choices.append(found)
        return Completion(**self._head, choices=choices, usage=self.usage())

    async def chunks(self) -> AsyncIterator[Completion]:
        """Yield text as it arrives, after the prompt if it is echoed; the last chunk of a choice has its finish reason.
        The total usage comes last, if asked for."""
        scores: dict[int, CompletionLogprobs | None] = {}
        async for index, delta in self._deltas():
            if index not in scores:
                prompt = index // self._request.candidates
                scores[index] = self._scores_of(prompt)
                if self._request.echo:
                    yield self._chunk(await self._repeat(prompt, index))
            if delta.text or delta.logprobs or delta.finish_reason or self._with_ids or delta.pieces:
                choice = self._piece(index, scores[index], delta)
                choice.speculation = self._runs(delta)
                yield self._chunk(choice)
        if self._asked.include_usage:
            yield Completion(**self._head, choices=[], usage=self.usage())

    def _piece(
        self, index: int, scores: CompletionLogprobs | None, found: Answer | Delta
    ) -> CompletionChoice:
        logprobs = None if scores is None else scores.format(found.logprobs or [])
        return CompletionChoice(index, found.text, logprobs, found.finish_reason, self._ids(found.token_ids))

    async def _repeat(self, prompt: int, index: int) -> CompletionChoice:
        """Return the prompt that ``echo`` puts before the answer."""
        given, logprobs = self._prompts[prompt], await self._prompt_logprobs(prompt)
        return CompletionChoice(index, given.text, logprobs, None, self._ids(given.tokens))

    def _scores_of(self, prompt: int) -> CompletionLogprobs | None:
        """Return the formatter of the logprobs of a prompt and its answers, None if none were asked for."""
        if self._request.logprobs is None:
            return None
        given, tokenizer = self._prompts[prompt], self._front.tokenizing.tokenizer
        hides = self._request.skip_special_tokens is not False
        return CompletionLogprobs(self._request.logprobs, tokenizer, len(given.text), given.tokens, hides)

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield the deltas of all jobs. A prompt's first job scores it; the others wait for that if it is written."""
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

    async def _prompt_logprobs(self, index: int) -> schema.CompletionLogprobs | None:
        """Return the formatted logprobs of an echoed prompt. They are formatted once for all choices, in a thread,
        because a long prompt takes long."""
        scores, prompt = self._scores_of(index), self._prompts[index]
        if self._scored and scores is not None and index not in self._written:
            given = prompt.text, prompt.tokens, self._answers(index)[0].prompt_logprobs
            self._written[index] = await asyncio.to_thread(scores.prompt, *given)
        return self._written.get(index)

    def _answers(self, prompt: int) -> list[Answer]:
        count = self._request.candidates
        return self.generation.answers[prompt * count : (prompt + 1) * count]

    def _chunk(self, choice: CompletionChoice) -> Completion:
        """Return a chunk. The first one of a choice carries the prompt's token ids."""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            choice.prompt_token_ids = self._prompt_ids(choice.index)
        return Completion(**self._head, choices=[choice], usage=self._usage_of_chunk(choice.index))


def _best(answers: Sequence[Answer], count: int) -> Sequence[Answer]:
    """Return the ``count`` answers with the highest mean log-probability, best first; unsorted if these are all."""
    if count == len(answers):
        return answers
    return sorted(answers, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(answer: Answer) -> float:
    found = [item.logprob for item in answer.logprobs]
    return sum(found) / max(len(found), 1)
