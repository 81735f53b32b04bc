"""The engine without a server, with drafts and without: python -m examples.clients.offline [--max-tokens 64]"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from specserve import LLM, SamplingParams

CONVERSATIONS = [
    [{"role": "user", "content": question}]
    for question in (
        "List 3 countries and their capitals.",
        "What is 12 + 30?",
        "Explain why the sky is blue.",
    )
]
CHAIN = {"speculative_num_steps": 5, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 6}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=64)
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=parser.parse_args(argv).max_tokens)
    plain = answers("plain decoding", params)
    drafted = answers("EAGLE-3 chain", params, speculative_algorithm="EAGLE3", **CHAIN)
    for text in drafted:
        print("-", text.replace("\n", "\n  "))
    print("the texts are", "the same" if plain == drafted else "different")


def answers(name: str, params: SamplingParams, **settings: object) -> list[str]:
    """The answers of the bundled model. Prints what they took."""
    with LLM(**settings) as llm:
        llm.chat(CONVERSATIONS, params)  # the first call of a process is slower
        begun = time.perf_counter()
        found = llm.chat(CONVERSATIONS, params)
        seconds = time.perf_counter() - begun
    tokens = sum(len(answer.token_ids) for answer in found)
    steps = sum(answer.speculation.steps for answer in found)
    print(f"{name}: {tokens} tokens in {seconds:.2f} s, {(tokens - len(found)) / steps:.2f} a step")
    return [answer.text for answer in found]


if __name__ == "__main__":
    main()
