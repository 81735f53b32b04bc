"""Time to first token of requests that share a long system prompt, with and without the prefix cache.

    python -m benchmarks.prefix [--requests 64] [--system-tokens 2000]

Two servers of the bundled model with EAGLE-3's chain (5, 1, 6) on one engine thread, one of them without a prefix
cache, answer the same chats one by one, and all at once. The server with a cache gets them at once twice: first with an
empty cache, so that the first request computes what the others wait for, then again. Acceptance must be the same
everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from benchmarks.common import load_prompts
from benchmarks.http_client import Reply, as_json, ask_once, request, send_all, send_in_turn
from benchmarks.results import Figures, options, show, spread, write_results
from benchmarks.server import serving, settings
from benchmarks.traffic import CHAT
from specserve.config.paths import BUNDLED_MODEL
from specserve.frontend.tokenizer import Tokenizer
from tests.front.processes import Server

CHAIN = [
    *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "5"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "6"),
]
TARGET = 5.0  # times that the first token comes sooner


def make_chats(count: int, system_tokens: int) -> list[list[dict[str, str]]]:
    """Different questions after one system prompt, which alone is at least this many tokens."""
    tokenizer, rows, system = Tokenizer.load(str(BUNDLED_MODEL)), load_prompts(), ""
    for row in rows[50:]:
        system += row["prompt"]
        if len(tokenizer.encode(system)) >= system_tokens:
            break
    questions = [row["messages"][0]["content"] for row in rows[:50]]
    questions += [f"Please tell me. {question}" for question in questions]
    return [
        [{"role": "system", "content": system}, {"role": "user", "content": question}]
        for question in questions[:count]
    ]


def make_requests(chats: Sequence[list[dict[str, str]]], max_tokens: int) -> list[bytes]:
    common = {"model": "specserve-chat", "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return [
        request(CHAT, as_json({**common, "messages": chat, "stream": True, "return_speculation": True}))
        for chat in chats
    ]


def usages(replies: Sequence[Reply]) -> list[dict[str, Any]]:
    """The usage object that ends each stream."""
    return [reply.events()[-1]["usage"] for reply in replies]


def measure_prefix(server: Server, raws: Sequence[bytes]) -> dict[str, list[Reply]]:
    """Both ways to send the requests, each to an empty cache, after one that warms the server up."""
    asyncio.run(send_in_turn(server.url, raws[:1]))
    ask_once(server.url, "/flush_cache", b"")
    replies = {"one by one": asyncio.run(send_in_turn(server.url, raws))}
    ask_once(server.url, "/flush_cache", b"")
    return {**replies, "at once": asyncio.run(send_all(server.url, raws))}


def figures_of(replies: Sequence[Reply]) -> dict[str, Any]:
    said = usages(replies)
    total = {name: sum(each["speculation"][name] for each in said) for name in ("steps", "accepted")}
    return {
        "first token, s": spread([reply.first for reply in replies]),
        "prompt tokens": sum(each["prompt_tokens"] for each in said),
        "cached tokens": sum(each["prompt_tokens_details"]["cached_tokens"] for each in said),
        "mean accepted length": 1 + total["accepted"] / total["steps"],
    }


def prefix_ratios(cached: dict[str, list[Reply]], cold: dict[str, list[Reply]]) -> dict[str, float]:
    """How many times sooner the first token comes with the cache: means, and one by one the medians, as the first of
    all computes the prompt."""

    def times(replies: Sequence[Reply]) -> list[float]:
        return [reply.first for reply in replies]

    return {
        "one by one": median(times(cold["one by one"])) / median(times(cached["one by one"])),
        "at once": mean(times(cold["at once"])) / mean(times(cached["at once"])),
        "at once again": mean(times(cold["at once"])) / mean(times(cached["at once again"])),
    }


def acceptance_differs(cached: dict[str, list[Reply]], cold: dict[str, list[Reply]]) -> int:
    """Answers whose steps, drafted or accepted tokens are not those of the same request without a cache, one by one."""
    expected = [usage["speculation"] for usage in usages(cold["one by one"])]
    counts = [[usage["speculation"] for usage in usages(replies)] for replies in cached.values()]
    return sum(a != b for each in counts for a, b in zip(each, expected, strict=True))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--system-tokens", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32", choices=["float64", "float32"])
    args = parser.parse_args()
    asked = settings(args)
    raws = make_requests(make_chats(args.requests, args.system_tokens), args.max_tokens)
    pool = str(args.requests * (args.system_tokens + 512))
    flags = ["--dtype", args.dtype, *CHAIN, "--max-total-tokens", pool]
    flags += ["--max-running-requests", str(args.requests)]
    with serving(*flags) as server:
        cached = measure_prefix(server, raws)
        cached["at once again"] = asyncio.run(send_all(server.url, raws))
    with serving(*flags, "--disable-radix-cache") as server:
        cold = measure_prefix(server, raws)
    figures: Figures = {
        "with the prefix cache": {name: figures_of(replies) for name, replies in cached.items()},
        "without": {name: figures_of(replies) for name, replies in cold.items()},
        "times sooner": prefix_ratios(cached, cold),
        "answers": sum(map(len, cached.values())),
        "answers accepted otherwise": acceptance_differs(cached, cold),
    }
    show(figures)
    print(write_results("prefix", {**asked, **figures}, args.output))
    missed = [name for name, times in figures["times sooner"].items() if times < TARGET]
    raise SystemExit(1 if missed or figures["answers accepted otherwise"] else 0)


if __name__ == "__main__":
    main()
