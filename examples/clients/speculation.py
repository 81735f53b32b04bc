"""Which tokens came together: python -m examples.clients.speculation QUESTION [--max-draft-tokens N]

Prints the answer in the colours of its steps: green tokens were drafted and accepted, a plain one is the bonus token
that ends each step. The text is the same for every N; 0 decodes plainly.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from openai import OpenAI

from examples.clients.server import connection, reached

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("question", metavar="QUESTION")
    parser.add_argument("--max-draft-tokens", type=int, metavar="N", help="most that are drafted in a step")
    args = parser.parse_args(argv)
    extensions = {"return_speculation": True}
    if args.max_draft_tokens is not None:
        extensions["speculation"] = {"max_draft_tokens": args.max_draft_tokens}
    usage = None
    with reached(), OpenAI(**connection()) as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": args.question}],
            temperature=0,
            stream=True,
            extra_body=extensions,
        )
        for chunk in stream:
            for choice in chunk.choices:
                print("".join(coloured(getattr(choice, "speculation", None))), end="", flush=True)
            usage = chunk.usage or usage
    print()
    print(usage.speculation)


def coloured(speculation: dict[str, list] | None) -> Iterator[str]:
    """The pieces of a chunk. ``runs`` says how many of them each step gave, its bonus token last."""
    if speculation is None:
        return
    pieces = iter(speculation["pieces"])
    for run in speculation["runs"]:
        drafted = "".join(next(pieces) for _ in range(run - 1))
        yield f"{GREEN}{drafted}{PLAIN}" if drafted else ""
        yield next(pieces)


if __name__ == "__main__":
    main()
