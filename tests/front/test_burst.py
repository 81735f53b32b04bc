"""Bursts of requests: how the front processes them and how they reach the engine."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import zmq

from specserve.messages import Abort, decode_to_engine
from specserve.process.link import Outbox
from specserve.server.middleware import Turns


def test_others_run_between_the_requests_of_a_burst() -> None:
    async def run() -> list[int]:
        turns, done, seen = Turns(), 0, [0]

        async def request() -> None:
            nonlocal done
            await turns.wait()
            done += 1

        burst = [asyncio.create_task(request()) for _ in range(20)]
        while done < 20:
            await asyncio.sleep(0)
            seen.append(done)
        await asyncio.gather(*burst)
        return seen

    seen = asyncio.run(run())
    assert max(after - before for before, after in pairwise(seen)) == 1


def test_what_is_said_in_a_turn_is_one_frame_and_waits_for_the_engine(tmp_path: Path) -> None:
    async def run() -> list[list[object]]:
        with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
            address = f"ipc://{tmp_path}/engine"
            push.bind(address)
            outbox = Outbox(push)
            for rid in ("a", "b"):
                outbox.put(Abort(rid))
            await asyncio.sleep(0.05)  # nobody is there yet
            outbox.put(Abort("c"))
            pull.connect(address)
            frames = [await asyncio.to_thread(pull.recv)]
            outbox.put(Abort("d"))
            frames.append(await asyncio.to_thread(pull.recv))
            return [list(decode_to_engine(frame)) for frame in frames]

    assert asyncio.run(run()) == [[Abort("a"), Abort("b"), Abort("c")], [Abort("d")]]
