"""How sure the model is of each token: python -m examples.clients.logprobs QUESTION"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from openai import OpenAI

from examples.clients.server import connection, reached


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", metavar="QUESTION")
    parser.add_argument("--alternatives", type=int, default=3)
    args = parser.parse_args(argv)
    with reached(), OpenAI(**connection()) as client:
        found = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": args.question}],
            temperature=0,
            logprobs=True,
            top_logprobs=args.alternatives,
        )
    for token in found.choices[0].logprobs.content:
        others = "  ".join(f"{other.token!r} {math.exp(other.logprob):.1%}" for other in token.top_logprobs)
        print(f"{token.token!r:16} {math.exp(token.logprob):6.1%}   {others}")


if __name__ == "__main__":
    main()
