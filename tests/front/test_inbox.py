"""Unread tokens are merged into one message without loss."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from specserve.core import SamplingParams, SpeculationUsage, TokenLogprob
from specserve.frontend.output import OutputProcessor
from specserve.messages import Failed, Flushed, Ready, Submit, Tokens
from specserve.process.client import EngineClient
from tests.front.fakes import READY


def taken(messages: Sequence[Tokens | Failed], rids: Sequence[str] = ("a",)) -> list[Tokens | Failed]:
    """What a call with these requests gets, when it looks after all has come."""

    async def run() -> list[Tokens | Failed]:
        client = EngineClient(lambda _: None)
        inbox = client.submit([Submit(rid, [1], SamplingParams()) for rid in rids])
        for message in messages:
            client.receive(message)
        found = []
        while True:
            try:
                found.append(await asyncio.wait_for(inbox.get(), 0.02))
            except TimeoutError:
                return found

    return asyncio.run(run())


def tokens(rid: str, *ids: int, **more: object) -> Tokens:
    return Tokens(rid, list(ids), [len(ids)], **more)  # type: ignore[arg-type]


def test_messages_of_a_request_are_joined() -> None:
    first, second = TokenLogprob(1, -0.1, []), TokenLogprob(3, -0.3, [])
    totals = {"cached_tokens": 4, "speculation": SpeculationUsage(steps=2, drafted=6, accepted=1)}
    end = {"finish_reason": "stop", "stop_token": True, **totals}
    (found,) = taken(
        [
            tokens("a", 1, 2, logprobs=[first, first], prompt_logprobs=[second], queued=0.5),
            tokens("a", 3, logprobs=[second], cached_tokens=2),
            tokens("a", 9, logprobs=[second], **end),
        ]
    )
    logprobs = [first, first, second, second]
    whole = tokens("a", 1, 2, 3, 9, logprobs=logprobs, prompt_logprobs=[second], queued=0.5, **end)
    assert found == msgspec.structs.replace(whole, runs=[2, 1, 1])


def test_others_keep_their_order() -> None:
    messages = [
        tokens("a", 1),
        tokens("b", 2),
        tokens("a", 3),
        Failed("b", "gone"),
        tokens("a", 4),
        tokens("a", 5),
    ]
    found = taken(messages, ["a", "b"])
    assert found == [*messages[:4], Tokens("a", [4, 5], [1, 1])]


def test_what_was_taken_is_not_joined() -> None:
    async def run() -> None:
        client = EngineClient(lambda _: None)
        inbox = client.submit([Submit("a", [1], SamplingParams())])
        client.receive(tokens("a", 1))
        assert await inbox.get() == tokens("a", 1)
        client.receive(tokens("a", 2))
        assert await inbox.get() == tokens("a", 2)

    asyncio.run(run())


def test_an_answer_is_the_same_in_one_message_or_in_many() -> None:
    usages = [SpeculationUsage(steps=n, drafted=3 * n, accepted=n) for n in range(4)]
    messages = [tokens("a", 10 * n, 10 * n + 1, speculation=usages[n], cached_tokens=1) for n in range(4)]
    messages[-1] = tokens("a", 30, 31, speculation=usages[3], cached_tokens=1, finish_reason="length")
    one, many = (OutputProcessor(SamplingParams(), None) for _ in range(2))
    (joined,) = taken(messages)
    assert isinstance(joined, Tokens)
    one.push(joined)
    for message in messages:
        many.push(message)
    assert one.answer == many.answer


@pytest.mark.parametrize(("ranks", "state"), [(1, "ready"), (2, "broken")])
def test_other_ranks_do_not_wait_for_a_process_that_is_stopped(ranks: int, state: str) -> None:
    client, info = EngineClient(lambda _: None), msgspec.structs.replace(READY.info, ranks=[{}] * ranks)
    client.receive(Ready(info, {"watchdog_timeout": 300, "dist_timeout": 4}, []))
    client.count_silence(9, True)
    client.submit([Submit("a", [1], SamplingParams())])
    for stopped in (True, False, True):
        client.count_silence(3, stopped)
        assert client.state == "ready"
    client.count_silence(1, True)
    assert client.state == state


def test_an_engine_owes_an_answer_also_to_who_has_left() -> None:
    async def run() -> None:
        client = EngineClient(lambda _: None)
        client.receive(Ready(READY.info, {"watchdog_timeout": 10}, []))
        client.count_silence(100)
        assert (client.state, client.stalled) == ("ready", False)
        flushed = asyncio.create_task(client.flush_cache())
        await asyncio.sleep(0)
        client.count_silence(1)
        assert client.stalled
        client.receive(Flushed(3))
        assert (await flushed, client.stalled) == (3, False)
        client.submit([Submit("a", [1], SamplingParams())])
        client.count_silence(5)
        client.abort("a")
        client.count_silence(5)
        assert (client.state, client.failure.message) == (
            "broken",
            "it said nothing for 10 seconds (--watchdog-timeout)",
        )

    asyncio.run(run())
