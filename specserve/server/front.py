"""What the routes work with: settings, engine, tokenizer, metrics, and the checks that every call needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from specserve.config import Settings, make_settings
from specserve.frontend.engine_client import EngineClient
from specserve.frontend.generation import Generation, Job
from specserve.frontend.tokenizer import Tokenizer
from specserve.metrics.front import Metrics
from specserve.server.errors import ApiError

T = TypeVar("T")


def is_served(model: str, names: Sequence[str]) -> bool:
    """Whether a request for ``model`` means one of ``names``: as the hub has renamed models, with or without the
    organisation and a leading ``Meta-``, in any case."""
    return _bare(model) in {_bare(name) for name in names}


def _bare(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold().removeprefix("meta-")


class Front:
    """``settings`` are the given ones until ``finish_loading`` takes what the engine made of them."""

    def __init__(self, settings: Settings, engine: EngineClient) -> None:
        self.engine = engine
        self.metrics = Metrics(lambda: engine.stats)
        self.started = int(time.time())
        self.stopping = False
        self._given = settings
        self._resolved: Settings | None = None
        self._tokenizer: Tokenizer | None = None
        self._thread = ThreadPoolExecutor(1, "tokenizer")  # keeps long prompts off the event loop

    def finish_loading(self, tokenizer: Tokenizer | None) -> None:
        """The engine is ready, and so is the tokenizer unless there is to be none."""
        self._tokenizer = tokenizer
        self._resolved = make_settings(**self.engine.info["settings"])

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def settings(self) -> Settings:
        return self._resolved or self._given

    @property
    def unready(self) -> str | None:
        """Why no request would be served now, or None."""
        if self.engine.state == "broken":
            return f"the engine is gone: {self.engine.failure.message}"
        if self.stopping:
            return "the server is stopping"
        return "the model is loading" if self._resolved is None else None

    @property
    def context_length(self) -> int:
        assert self.settings.context_length is not None
        return self.settings.context_length

    @property
    def vocab_size(self) -> int:
        return int(self.engine.info["vocab_size"])

    @property
    def default_temperature(self) -> float:
        return 0.0 if self.settings.requests_all_greedy else 1.0

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError when the server runs without one."""
        if self._tokenizer is None:
            raise ApiError(
                400, "this server runs without a tokenizer (--skip-tokenizer-init): token ids alone"
            )
        return self._tokenizer

    def check_call(self, model: str) -> None:
        """Raises ApiError unless a request for ``model`` would be served now."""
        if self.unready is not None:
            raise ApiError(503, self.unready, code="not_ready")
        if not is_served(model, self.settings.served_model_name):
            names = ", ".join(self.settings.served_model_name)
            raise ApiError(
                404, f"no model {model!r} here; this server has {names}", "model", "model_not_found"
            )

    def check_prompt(self, prompt: Sequence[int], param: str, min_tokens: int) -> None:
        """Raises ApiError unless the prompt leaves room for an answer."""
        if not prompt:
            raise ApiError(400, f"{param}: must not be empty", param)
        for token in prompt:
            if not 0 <= token < self.vocab_size:
                raise ApiError(
                    400, f"{param}: token ids are from 0 to {self.vocab_size - 1}, found {token}", param
                )
        pool = int(self.engine.info["max_total_tokens"])
        room = min(self.context_length, pool) - len(prompt)
        if room < 1:
            short = (
                "the context length" if self.context_length <= pool else "the KV pool (--max-total-tokens)"
            )
            limit = min(self.context_length, pool)
            message = f"{param}: has {len(prompt)} tokens; {short} is {limit}, the answer included"
            raise ApiError(400, message, param, "context_length_exceeded")
        if min_tokens > room:
            raise ApiError(
                400, f"min_tokens: there is room for {room} tokens, found {min_tokens}", "min_tokens"
            )

    async def encode(self, text: str) -> list[int]:
        return await self._off_loop(self.tokenizer.encode, text)

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Raises ApiError with the chat template's reason."""
        try:
            return await self._off_loop(self.tokenizer.encode_chat, messages)
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None

    def generation(self, jobs: Sequence[Job]) -> Generation:
        return Generation(self.engine, self._tokenizer, self.metrics, jobs)

    async def _off_loop(self, work: Callable[..., T], argument: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, argument)
