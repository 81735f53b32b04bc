"""A conversation, each answer as it comes: python -m examples.clients.chat QUESTION [QUESTION ...]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from openai import OpenAI

from examples.clients.server import connection, reached


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="+", metavar="QUESTION", help="asked one after the other")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args(argv)
    messages = []
    with reached(), OpenAI(**connection()) as client:
        model = client.models.list().data[0].id
        for question in args.questions:
            messages.append({"role": "user", "content": question})
            answer = ask(client, model, messages, args.temperature)
            messages.append({"role": "assistant", "content": answer})


def ask(client: OpenAI, model: str, messages: list[dict[str, str]], temperature: float) -> str:
    """Prints the answer piece by piece and returns it whole."""
    print(f"> {messages[-1]['content']}")
    pieces = []
    stream = client.chat.completions.create(
        model=model, messages=messages, temperature=temperature, stream=True
    )
    for chunk in stream:
        pieces.append(chunk.choices[0].delta.content or "")
        print(pieces[-1], end="", flush=True)
    print()
    return "".join(pieces)


if __name__ == "__main__":
    main()
