"""State that the routes share: settings, engine, tokenizer, metrics, and the checks that every call needs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from specserve.config import Settings, make_settings
from specserve.core import Capacity, FieldError, SamplingParams
from specserve.frontend.answers import Formats
from specserve.frontend.conversation import Conversation
from specserve.frontend.generation import Generation, Job, TokenStatistics
from specserve.frontend.parsers.registry import Format, choose_format
from specserve.frontend.tokenizer import Tokenizer, TooLong
from specserve.frontend.tools import Tool
from specserve.metrics.front import Metrics
from specserve.process.client import EngineClient
from specserve.server import schema
from specserve.server.errors import ApiError

log = logging.getLogger(__name__)

T = TypeVar("T")
TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""The caller of the current request: a digest of its key."""
_WITHOUT = "this server runs without a tokenizer (--skip-tokenizer-init)"


def is_served(model: str, names: Sequence[str]) -> bool:
    """Return whether a request for ``model`` means one of ``names``. As on the hub, the organisation and a leading
    ``Meta-`` may be left out, and case does not matter."""
    return _bare(model) in {_bare(name) for name in names}


def _bare(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold().removeprefix("meta-")


class Front:
    """The front process's state. ``settings`` are those given until an engine reports the resolved ones."""

    def __init__(self, settings: Settings, engine: EngineClient) -> None:
        self.engine = engine
        self.metrics = Metrics(lambda: engine.stats, lambda: engine.restarts, self._first_name)
        self.token_statistics = TokenStatistics() if settings.token_statistics else None
        self.started = int(time.time())
        self.stopping = False
        self.calls = 0  # HTTP requests whose body has arrived and whose answer has not ended
        self._preparing = 0  # answers that were requested and not yet submitted
        self._given = settings
        self._resolved: tuple[object, Settings] | None = None  # what the engine reported, and its settings
        self._loaded = False
        self._tokenizer: Tokenizer | None = None
        self.calls_format: Format | None = None  # of the model's tool calls, if known
        self._formats: Formats | None = None
        self.thread = ThreadPoolExecutor(1, "tokenizer")  # keeps long prompts off the event loop
        self._waiting: set[asyncio.Future[Any]] = set()  # calls queued for the thread
        self._ended = False
        self._noted: set[str] = set()

    def finish_loading(self, tokenizer: Tokenizer | None) -> None:
        """Take the loaded tokenizer, None if there is none."""
        self._tokenizer = tokenizer
        if tokenizer is not None:
            found, why = choose_format(self._given.tool_call_parser, tokenizer.template_text)
            self.calls_format = found
            self._formats = Formats.of(tokenizer, found, self._given.reasoning_parser != "none")
            log.info("tool calls are %s: %s", f"parsed as {found.name}" if found else "not parsed", why)
        self._loaded = True

    def note_once(self, words: str) -> None:
        """Log once that a part of requests has no effect. ``words`` contain nothing from a request."""
        if words not in self._noted:
            self._noted.add(words)
            log.warning("accepted but ignored: %s", words)

    def end(self) -> None:
        """Answer the calls that wait for the tokenizer, and new ones, with an error, because the engine is gone. The
        thread's current work can't be stopped."""
        self._ended = True
        for waiting in self._waiting:
            waiting.cancel()

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)

    @property
    def settings(self) -> Settings:
        said = self.engine.info.get("settings")
        if said is None:
            return self._given
        if self._resolved is None or self._resolved[0] is not said:
            self._resolved = said, make_settings(**said)
        return self._resolved[1]

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
        return (
            f"the engine has said nothing for {self.engine.silence:g} seconds"
            if self.engine.stalled
            else None
        )

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

    @property
    def context_length(self) -> int:
        assert self.settings.context_length is not None
        return self.settings.context_length

    @property
    def vocab_size(self) -> int:
        return int(self.engine.info["vocab_size"])

    @property
    def request_defaults(self) -> Mapping[str, float]:
        """Return the sampling parameters of requests that don't set them, where they are not those of OpenAI."""
        found: Mapping[str, float] = self.engine.info.get("request_defaults", {})
        return found

    @property
    def no_grammars(self) -> str | None:
        """Return why requests can't use grammars, None if they can."""
        if not self.has_tokenizer:
            return "this server runs without a tokenizer"
        reason = self.engine.info.get("no_grammars")
        return None if reason is None else str(reason)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "calls that need one were checked"
        return self._tokenizer

    def _check_text(self, param: str) -> None:
        """Raise FieldError for text if there is no tokenizer."""
        if not self.has_tokenizer:
            raise FieldError(param, f"{_WITHOUT}; the prompt of /v1/completions may be token ids")

    def check_call(self, model: str | None) -> None:
        """Raise ApiError unless a request for ``model`` (None: any) would be served now."""
        if self.unready is not None:
            raise ApiError(503, self.unready, code="not_ready")
        if model is not None and not is_served(model, self.settings.served_model_name):
            names = ", ".join(self.settings.served_model_name)
            raise ApiError(
                404, f"this server has no model {model!r}; it serves {names}", "model", "model_not_found"
            )

    @contextlib.contextmanager
    def place(self, answers: int, param: str) -> Iterator[None]:
        """Reserve places for as many answers as ``param`` asks for, until they are submitted. Raises ApiError if the
        queue is full."""
        limit = (self.settings.max_running_requests or 0) + self.settings.max_queued_requests
        if answers > limit:
            flags = "(--max-running-requests and --max-queued-requests)"
            raise FieldError(param, f"{answers} answers in one call exceed the limit of {limit} {flags}")
        taken = self.engine.open + self._preparing
        if taken + answers > limit:
            self.metrics.rejected(answers)
            raise ApiError(
                429,
                f"the queue is full: {answers} requested, {taken} running or waiting, limit {limit} "
                "(--max-running-requests and --max-queued-requests)",
                code="rate_limit_exceeded",
            )
        self._preparing += answers
        try:
            yield
        finally:
            self._preparing -= answers

    @property
    def capacity(self) -> Capacity:
        """Return the engine's capacity, as it reported."""
        return Capacity(
            context_length=self.context_length,
            pool_tokens=int(self.engine.info["max_total_tokens"]),
            vocab_size=self.vocab_size,
            all_greedy=self.settings.requests_all_greedy,
        )

    def check(self, prompt: Sequence[int], params: SamplingParams, param: str) -> None:
        """Raise FieldError, with the prompt called ``param``, for a request that the engine would refuse."""
        self.capacity.check(prompt, params, param)

    async def encode(self, text: str, param: str) -> list[int]:
        """Return the tokens of a prompt. Raises FieldError naming ``param`` for a text far longer than the context."""
        self._check_text(param)
        try:
            return await self._off_loop(self.tokenizer.encode, text, self.capacity.room)
        except TooLong as error:
            raise self.capacity.too_long(param, str(error)) from None

    async def encode_answer(self, text: str, most: int) -> list[int]:
        """Return the tokens of a text as part of an answer. Raises TooLong for far more than ``most`` tokens."""
        return await self._off_loop(self.tokenizer.encode_answer, text, most)

    async def encode_chat(
        self,
        messages: Conversation,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation. Raises ApiError with the template's reason, or as ``encode`` does."""
        self._check_text("messages")
        try:
            arguments = messages, self.capacity.room, tools, variables
            return await self._off_loop(self.tokenizer.encode_chat, *arguments)
        except TooLong as error:
            raise self.capacity.too_long("messages", str(error)) from None
        except FieldError:
            raise
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None

    @property
    def formats(self) -> Formats:
        """Return how answers are parsed and constrained."""
        assert self._formats is not None, "calls that need a tokenizer were checked"
        return replace(self._formats, ends=self.engine.info.get("eos_token_ids", ()))

    @property
    def no_budgets(self) -> str | None:
        """Return why thinking can't have a budget, None if it can."""
        if self.settings.reasoning_parser == "none":
            return "the format of this model's reasoning is unknown (--reasoning-parser)"
        return self.no_grammars

    async def decode(self, tokens: Sequence[int], param: str) -> str:
        """Return the text of tokens, special ones included. Raises FieldError for more tokens than the context length,
        for ids outside the vocabulary, and without a tokenizer."""
        if not self.has_tokenizer:
            raise FieldError(param, f"{_WITHOUT}, so it can't decode tokens")
        if len(tokens) > self.context_length:
            most = f"at most {self.context_length}, the context length, can be decoded"
            raise FieldError(param, f"has {len(tokens)} tokens; {most}")
        self.capacity.check_tokens(param, tokens)
        return await self._off_loop(
            functools.partial(self.tokenizer.decode, skip_special_tokens=False), tokens
        )

    def generation(self, jobs: Sequence[Job], name: str) -> Generation:
        """Return the generation of one call. ``POST /abort_request`` knows it by ``name``."""
        log.debug("%s: %d answers", name, len(jobs))
        return Generation(
            self.engine,
            self._tokenizer,
            self.metrics,
            jobs,
            self.token_statistics,
            name=name,
            timeout=self.settings.request_timeout,
            tenant=TENANT.get(),
        )

    async def _off_loop(self, work: Callable[..., T], *arguments: object) -> T:
        """Run work in the tokenizer's thread. A call cancelled while queued gives up its place. Raises ApiError when
        the server ends."""
        if self._ended:
            raise self._gone
        waiting = asyncio.get_running_loop().run_in_executor(self.thread, work, *arguments)
        self._waiting.add(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if self._ended:
                raise self._gone from None
            raise
        finally:
            self._waiting.discard(waiting)

    @property
    def _gone(self) -> ApiError:
        return ApiError(503, self.engine.words, code="not_ready")
