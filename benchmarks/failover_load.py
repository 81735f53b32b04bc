"""Clients that never stop asking, for streams half of the time, and a count of how each request ended."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

WHOLE_OK = "whole ok"
WHOLE_FAILED = "whole failed"
STREAM_COMPLETE = "stream complete"  # every choice has a finish reason, and [DONE] follows
STREAM_ERROR_EVENT = "stream ended by an error event"
STREAM_BROKEN = "stream ended by a broken connection"  # clients raise: the body's last chunk is missing
STREAM_REFUSED = "stream refused"  # its status was not 200, or there was no answer
STREAM_TRUNCATED = "stream silently truncated"  # looks whole and is not
OUTCOMES = (
    WHOLE_OK,
    WHOLE_FAILED,
    STREAM_COMPLETE,
    STREAM_ERROR_EVENT,
    STREAM_BROKEN,
    STREAM_REFUSED,
    STREAM_TRUNCATED,
)
LOST = (WHOLE_FAILED, STREAM_REFUSED, STREAM_TRUNCATED)
"""What must not be."""


@dataclass
class Tally:
    """Counts of how requests ended. ``texts``: the answers of successful greedy requests, by prompt."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)  # seconds
    texts: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, outcome: str, seconds: float, reason: str = "") -> None:
        self.outcomes[outcome] += 1
        self.longest[outcome] = max(seconds, self.longest.get(outcome, 0.0))
        if reason:
            self.reasons[f"{outcome}: {reason}"] += 1

    def heard(self, prompt: str, text: str) -> None:
        self.texts.setdefault(prompt, Counter())[text] += 1

    @property
    def lost(self) -> int:
        return sum(self.outcomes[outcome] for outcome in LOST)

    def report(self) -> dict[str, Any]:
        return {
            "requests": self.outcomes.total(),
            **{outcome: self.outcomes[outcome] for outcome in OUTCOMES},
            "prompts": len(self.texts),
            "prompts with more than one text": sum(len(texts) > 1 for texts in self.texts.values()),
            "longest seconds": {outcome: round(seconds, 2) for outcome, seconds in self.longest.items()},
            "reasons": dict(self.reasons),
        }


class Load:
    """``clients`` request completions within the ``async with`` block; leaving it waits for the last answers."""

    def __init__(self, url: str, body: Mapping[str, Any], prompts: Sequence[str], clients: int = 8) -> None:
        self.tally = Tally()
        self.under_way: Counter[str] = Counter()  # "whole", and "stream" of which something has come
        self._body = body
        self._prompts = prompts
        self._clients = clients
        self._http = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None))
        self._stop = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def until_busy(self) -> None:
        """Wait until every client has a request under way. Raises TimeoutError after a minute."""
        async with asyncio.timeout(60):
            while self.under_way.total() < self._clients:
                await asyncio.sleep(0.005)

    async def _client(self, number: int) -> None:
        turn = number
        while not self._stop:
            begun = time.monotonic()
            ask = random.choice((self._stream, self._whole))  # so that each replica gets both
            outcome, reason = await ask(self._prompts[turn % len(self._prompts)])
            self.tally.add(outcome, time.monotonic() - begun, reason)
            turn += self._clients

    async def _whole(self, prompt: str) -> tuple[str, str]:
        self.under_way["whole"] += 1
        try:
            answer = await self._http.post("/v1/completions", json={**self._body, "prompt": prompt})
        except httpx.HTTPError as error:
            return WHOLE_FAILED, repr(error)
        finally:
            self.under_way["whole"] -= 1
        if answer.status_code != 200:
            return WHOLE_FAILED, f"{answer.status_code} {answer.text[:200]}"
        (choice,) = answer.json()["choices"]
        if choice["finish_reason"] is None:
            return WHOLE_FAILED, "no finish reason"
        self.tally.heard(prompt, choice["text"])
        return WHOLE_OK, ""

    async def _stream(self, prompt: str) -> tuple[str, str]:
        body = {**self._body, "prompt": prompt, "stream": True}
        begun = False
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    return STREAM_REFUSED, f"{answer.status_code} {(await answer.aread()).decode()[:200]}"
                begun = True
                self.under_way["stream"] += 1
                try:
                    return await self._read(prompt, answer)
                finally:
                    self.under_way["stream"] -= 1
        except httpx.HTTPError as error:
            return (STREAM_BROKEN if begun else STREAM_REFUSED), repr(error)

    async def _read(self, prompt: str, answer: httpx.Response) -> tuple[str, str]:
        """Read to the connection's end, which comes after the last event."""
        text, finished, ended, message = "", False, False, None
        async for line in answer.aiter_lines():
            if not line:
                continue
            data = line.removeprefix("data: ")
            ended = data == "[DONE]"
            event = {"choices": []} if ended else json.loads(data)
            message = event["error"]["message"] if "error" in event else message
            for choice in event.get("choices", ()):
                text += choice["text"]
                finished |= choice["finish_reason"] is not None
        if message is not None:
            return STREAM_ERROR_EVENT, message
        if not (finished and ended):
            return STREAM_TRUNCATED, f"{len(text)} characters, {finished=}, {ended=}"
        self.tally.heard(prompt, text)
        return STREAM_COMPLETE, ""
