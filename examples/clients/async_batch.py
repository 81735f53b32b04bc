"""Many requests at once: python -m examples.clients.async_batch [--requests 32] [--at-once 8]

The server batches what it gets; requests beyond its limit of running ones wait in its queue.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from examples.clients.server import connection, reached


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=8)
    args = parser.parse_args(argv)
    if min(args.requests, args.at_once) < 1:
        parser.error("--requests and --at-once must be at least 1")
    with reached():
        asyncio.run(run(args.requests, args.at_once))


async def run(requests: int, at_once: int) -> None:
    places = asyncio.Semaphore(at_once)
    async with AsyncOpenAI(**connection()) as client:
        model = (await client.models.list()).data[0].id

        async def ask(question: str) -> ChatCompletion:
            async with places:
                return await client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": question}], temperature=0
                )

        questions = [f"What is {number} + {number + 7}?" for number in range(requests)]
        begun = time.perf_counter()
        answers = await asyncio.gather(*map(ask, questions))
        seconds = time.perf_counter() - begun
    for question, answer in zip(questions, answers, strict=True):
        print(question, answer.choices[0].message.content)
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    print(f"{requests} answers, {tokens} tokens, {tokens / seconds:.0f} tokens a second")


if __name__ == "__main__":
    main()
