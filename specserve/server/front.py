"""State that the routes share: what is served, the tokenizer's thread, places in the queue, engine and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from specserve.config import Settings, make_settings
from specserve.constraints.marks import CHANNEL, THINK
from specserve.core import Capacity, FieldError, SamplingParams, prediction_limit
from specserve.frontend.answers import Formats
from specserve.frontend.conversation import ANSWER, Conversation, Turn, joined
from specserve.frontend.generation import Generation, Job, TokenStatistics
from specserve.frontend.parsers.registry import AUTO, FORMATS, choose_format
from specserve.frontend.tokenizer import Tokenizer, TooLong
from specserve.frontend.tools import Tool
from specserve.messages import EngineInfo, Ready
from specserve.metrics.front import Metrics
from specserve.process.client import EngineClient
from specserve.server import schema
from specserve.server.errors import ApiError
from specserve.server.protocol import PredictionField

if TYPE_CHECKING:
    from specserve.metrics.traces import Traces

log = logging.getLogger(__name__)

T = TypeVar("T")
TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""The caller of the current request: a digest of its key."""
_WITHOUT = "this server runs without a tokenizer (--skip-tokenizer-init)"


def _traces_to(endpoint: str | None) -> Traces | None:
    if endpoint is None:
        return None
    try:
        from specserve.metrics.traces import Traces
    except ImportError as error:
        words = "--otlp-traces-endpoint needs OpenTelemetry: pip install 'specserve[otlp]'"
        raise ValueError(f"{words} ({error})") from None
    return Traces(endpoint)


def is_served(model: str, names: Sequence[str]) -> bool:
    """Return whether a request for ``model`` means one of ``names``. As on the hub, the organisation and a leading
    ``Meta-`` may be left out, and case does not matter."""
    return _bare(model) in {_bare(name) for name in names}


def _bare(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold().removeprefix("meta-")


@dataclass(frozen=True)
class Served:
    """What an engine serves, as it reported when it was ready. ``formats``: of answers; None without a tokenizer.
    ``no_grammars``: why requests can't use grammars, ``no_budgets``: why thinking can't have a budget; None if they
    can."""

    ready: Ready
    settings: Settings
    capacity: Capacity
    formats: Formats | None
    no_grammars: str | None
    no_budgets: str | None

    @classmethod
    def of(cls, ready: Ready, formats: Formats | None) -> Served:
        info, settings = ready.info, make_settings(**ready.settings)
        without = "this server runs without a tokenizer" if formats is None else info.no_grammars
        unknown = "the format of this model's reasoning is unknown (--reasoning-parser)"
        no_budgets, limits = without, (info.context_length, info.max_total_tokens, info.vocab_size)
        if formats is not None:
            no_budgets = unknown if formats.close is None else without
            ends, vocab_size = info.eos_token_ids, info.vocab_size
            formats = replace(formats, ends=ends, no_grammars=without, vocab_size=vocab_size)
        capacity = Capacity(*limits, settings.requests_all_greedy)
        return cls(ready, settings, capacity, formats, without, no_budgets)

    @property
    def info(self) -> EngineInfo:
        return self.ready.info


class Tokenizing:
    """Runs a tokenizer in a thread of its own, which keeps long prompts off the event loop."""

    def __init__(self, gone: Callable[[], ApiError]) -> None:
        """``gone`` makes the error for calls that wait for the thread when the engine is gone."""
        self.thread = ThreadPoolExecutor(1, "tokenizer")
        self.tokenizer: Tokenizer | None = None
        self._gone = gone
        self._waiting: set[asyncio.Future[Any]] = set()  # calls queued for the thread
        self._ended = False

    def end(self) -> None:
        """Answer the calls that wait, and new ones, with an error. The thread's current work can't be stopped."""
        self._ended = True
        for waiting in self._waiting:
            waiting.cancel()

    async def encode(self, text: str, param: str, capacity: Capacity, special: bool = True) -> list[int]:
        """Return the tokens of a prompt, with the ``special`` ones that the tokenizer adds or without. Raises
        FieldError naming ``param`` for a text far longer than the context."""
        tokenizer = self._needed(param)
        encode = tokenizer.encode if special else tokenizer.encode_answer
        return await self._prompt(param, capacity, encode, text, capacity.room)

    async def encode_chat(
        self,
        messages: Conversation,
        capacity: Capacity,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        turn: Turn = ANSWER,
    ) -> list[int]:
        """Return the tokens of a conversation. Raises ApiError with the template's reason, or as ``encode`` does."""
        arguments = messages, capacity.room, tools, variables, turn
        try:
            return await self._prompt("messages", capacity, self._needed("messages").encode_chat, *arguments)
        except FieldError:
            raise
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None

    async def with_prediction(
        self, params: SamplingParams, given: PredictionField | None, capacity: Capacity
    ) -> SamplingParams:
        """Return the parameters with the tokens of a predicted text. Raises FieldError if there is no room for it."""
        if given is None:
            return params
        if self.tokenizer is None:
            raise FieldError("prediction", "this server runs without a tokenizer")
        most = prediction_limit(capacity.context_length)
        try:
            found = await self._run(self.tokenizer.encode_answer, joined(given.content), most)
            return msgspec.structs.replace(params, prediction=found)
        except TooLong as error:
            raise FieldError("prediction", f"{error}; the limit is {most}") from None

    async def decode(self, tokens: Sequence[int], param: str, capacity: Capacity) -> str:
        """Return the text of tokens, special ones included. Raises FieldError for more tokens than the context length,
        for ids outside the vocabulary, and without a tokenizer."""
        if self.tokenizer is None:
            raise FieldError(param, f"{_WITHOUT}, so it can't decode tokens")
        if len(tokens) > capacity.context_length:
            most = f"at most {capacity.context_length}, the context length, can be decoded"
            raise FieldError(param, f"has {len(tokens)} tokens; {most}")
        capacity.check_tokens(param, tokens)
        return await self._run(functools.partial(self.tokenizer.decode, skip_special_tokens=False), tokens)

    def _needed(self, param: str) -> Tokenizer:
        """Return the tokenizer. Raises FieldError for text if there is none."""
        if self.tokenizer is None:
            raise FieldError(param, f"{_WITHOUT}; the prompt of /v1/completions may be token ids")
        return self.tokenizer

    async def _prompt(
        self, param: str, capacity: Capacity, work: Callable[..., list[int]], *arguments: object
    ) -> list[int]:
        try:
            return await self._run(work, *arguments)
        except TooLong as error:
            raise capacity.too_long(param, str(error)) from None

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        """Run work in the thread. A call cancelled while queued gives up its place."""
        if self._ended:
            raise self._gone()
        waiting = asyncio.get_running_loop().run_in_executor(self.thread, work, *arguments)
        self._waiting.add(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if self._ended:
                raise self._gone() from None
            raise
        finally:
            self._waiting.discard(waiting)


class Places:
    """Limits the answers that run, wait in the engine or are being prepared."""

    def __init__(self, engine: EngineClient, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._preparing = 0  # answers that were requested and not yet submitted

    @contextlib.contextmanager
    def reserve(self, answers: int, param: str, settings: Settings) -> Iterator[None]:
        """Reserve places for as many answers as ``param`` asks for, until they are submitted. Raises ApiError if the
        queue is full."""
        limit = (settings.max_running_requests or 0) + settings.max_queued_requests
        flags = "(--max-running-requests and --max-queued-requests)"
        if answers > limit:
            raise FieldError(param, f"{answers} answers in one call exceed the limit of {limit} {flags}")
        taken = self._engine.open + self._preparing
        if taken + answers > limit:
            self._metrics.rejected(answers)
            words = (
                f"the queue is full: {answers} requested, {taken} running or waiting, limit {limit} {flags}"
            )
            raise ApiError(429, words, code="rate_limit_exceeded")
        self._preparing += answers
        try:
            yield
        finally:
            self._preparing -= answers


class Front:
    """The front process's state. ``settings`` are those given until an engine reports the resolved ones."""

    def __init__(self, settings: Settings, engine: EngineClient) -> None:
        self.engine = engine
        self.metrics = Metrics(lambda: engine.stats, lambda: engine.restarts, self._first_name)
        self.traces = _traces_to(settings.otlp_traces_endpoint)
        self.token_statistics = TokenStatistics() if settings.token_statistics else None
        self.started = int(time.time())
        self.stopping = False
        self.calls = 0  # HTTP requests whose body has arrived and whose answer has not ended
        self.tokenizing = Tokenizing(lambda: ApiError(503, engine.words, code="not_ready"))
        self.places = Places(engine, self.metrics)
        self._given = settings
        self._formats: Formats | None = None
        self._served: Served | None = None
        self._loaded = False
        self._noted: set[str] = set()

    def finish_loading(self, tokenizer: Tokenizer | None) -> None:
        """Take the loaded tokenizer, None if there is none."""
        self.tokenizing.tokenizer = tokenizer
        if tokenizer is not None:
            calls, why = choose_format(self._given.tool_call_parser, tokenizer.template_text)
            self._formats = Formats.of(tokenizer, calls, self._given.reasoning_parser)
            auto, text = self._given.reasoning_parser == AUTO, tokenizer.template_text
            if auto and self._formats.close is not None:
                log.info(
                    "reasoning is parsed as gpt-oss: tool calls are, or the chat template contains its marks"
                )
            elif auto and any(marks.close in text for marks in (THINK, CHANNEL)):
                log.info(
                    "reasoning, if the model writes any, is part of the content: --reasoning-parser separates it"
                )
            log.info("tool calls are %s: %s", f"parsed as {calls.name}" if calls else "not parsed", why)
        self._loaded, self._served = True, None

    @property
    def new_call_id(self) -> Callable[[], str]:
        """Return the function that makes ids of tool calls."""
        known = self._formats and self._formats.calls
        return (known or FORMATS["hermes"]).new_id

    def note_once(self, words: str) -> None:
        """Log once that a part of requests has no effect. ``words`` contain nothing from a request."""
        if words not in self._noted:
            self._noted.add(words)
            log.warning("accepted but ignored: %s", words)

    def close(self) -> None:
        self.tokenizing.thread.shutdown(wait=False, cancel_futures=True)
        if self.traces is not None:
            self.traces.close()

    @property
    def served(self) -> Served | None:
        """Return what the latest engine reported, None before the first one did."""
        if (ready := self.engine.ready) is None:
            return None
        if self._served is None or self._served.ready is not ready:
            self._served = Served.of(ready, self._formats)
        return self._served

    @property
    def settings(self) -> Settings:
        return self._given if (served := self.served) is None else served.settings

    def _first_name(self) -> str:
        return next(iter(self.settings.served_model_name), "")

    @property
    def unready(self) -> str | None:
        """Return why no request would be served now, or None."""
        if self.stopping:
            return "the server is stopping"
        if self.engine.state != "ready":
            return self.engine.words
        return self._stalled if self._loaded else "the model is loading"

    @property
    def _stalled(self) -> str | None:
        """Return that the engine has said nothing for a while, if so."""
        words = f"the engine has said nothing for {self.engine.silence:g} seconds"
        return words if self.engine.stalled else None

    @property
    def health(self) -> schema.Health | schema.Unready:
        """Return the health for readiness probes."""
        state = self.engine.state
        if self.stopping or state == "stopped":
            return schema.Unready("stopping")
        reason = self.engine.failure.message or msgspec.UNSET
        if state == "broken":
            return schema.Unready("failed", reason=reason)
        if state == "loading":
            return schema.Unready("starting", self.engine.phase, reason)
        if not self._loaded:
            return schema.Unready("starting", "loading the tokenizer")
        return schema.Unready("stalled", reason=self._stalled) if self._stalled else schema.Health()

    def serving(self, model: str | None = None) -> Served:
        """Return what is served. Raises ApiError unless a request for ``model`` (None: any) would be served now."""
        if (reason := self.unready) is not None:
            raise ApiError(503, reason, code="not_ready")
        served = self.served
        assert served is not None, "an engine is ready"
        if model is not None and not is_served(model, served.settings.served_model_name):
            words = f"this server has no model {model!r}; it serves {', '.join(served.settings.served_model_name)}"
            raise ApiError(404, words, "model", "model_not_found")
        return served

    def generation(self, jobs: Sequence[Job], name: str, salt: str = "") -> Generation:
        """Return the generation of one call. ``POST /abort_request`` knows it by ``name``. ``salt``: as in
        ``Submit``."""
        log.debug("%s: %d answers", name, len(jobs))
        return Generation(
            self.engine,
            self.tokenizing.tokenizer,
            self.metrics,
            jobs,
            self.token_statistics,
            name=name,
            timeout=self.settings.request_timeout,
            tenant=TENANT.get(),
            salt=salt,
        )
