"""The bundled model on a CPU: speed as ratios within one run, and what the prefix cache brings."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import mean, median
from typing import Any

import torch

from benchmarks.common import CODE_TOKENS, load_prompts, run_prompts
from benchmarks.http_client import Connection, Reply, as_json, ask_once, request, send_once
from benchmarks.results import options, run_command, write_results
from benchmarks.server import serving, settings, show, spread
from benchmarks.traffic import CHAT
from specserve import LLM
from specserve.config.paths import BUNDLED_MODEL
from specserve.frontend.tokenizer import Tokenizer
from tests.front.processes import Server

CHAIN = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 6,
}
Rows = Sequence[dict[str, Any]]
Contestant = Callable[[Rows], int]


def specserve_contestant(llm: LLM) -> Contestant:
    return lambda rows: sum(len(o.token_ids) for o in run_prompts(llm, rows, temperature=0))


def transformers_contestant() -> Contestant:
    """The bundled model in float32 through ``generate``, a prompt at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)

    @torch.inference_mode()
    def run(rows: Rows) -> int:
        tokens = 0
        for row in rows:
            if "messages" in row:
                text = tokenizer.apply_chat_template(
                    row["messages"], add_generation_prompt=True, tokenize=False
                )
                ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
            else:
                ids = tokenizer(row["prompt"], return_tensors="pt")
            most = 512 if "messages" in row else CODE_TOKENS
            out = model.generate(
                input_ids=ids["input_ids"],
                attention_mask=torch.ones_like(ids["input_ids"]),
                max_new_tokens=most,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
            tokens += out.shape[1] - ids["input_ids"].shape[1]
        return tokens

    return run


def race(contestants: dict[str, Contestant], batches: Sequence[Rows], rounds: int) -> dict[str, float]:
    """Tokens a second of each: over all batches, each batch's time the median of its rounds."""
    seconds: dict[str, float] = dict.fromkeys(contestants, 0.0)
    tokens: dict[str, int] = dict.fromkeys(contestants, 0)
    for run in contestants.values():
        run(batches[0])
    for batch in batches:
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name, run in contestants.items():
                start = time.perf_counter()
                count = run(batch)
                times[name].append(time.perf_counter() - start)
        for name in contestants:
            seconds[name] += median(times[name])
            tokens[name] += count
    return {name: tokens[name] / seconds[name] for name in contestants}


def race_dtypes(args: argparse.Namespace, mixed: Rows) -> dict[str, Any]:
    """Plain decoding in each dtype, one and eight requests at a time; ratios to the first dtype, and how many texts
    are those of a request that runs alone."""
    given = {"model_path": args.model_path, "cpu_threads": args.threads, "disable_radix_cache": True}
    with ExitStack() as stack:
        llms = {dtype: stack.enter_context(LLM(dtype=dtype, **given)) for dtype in args.dtypes}
        contestants = {dtype: specserve_contestant(llm) for dtype, llm in llms.items()}
        batches = [mixed[i : i + 8] for i in range(0, args.prompts - 7, 8)]
        one = race(contestants, [[row] for row in mixed[: args.prompts]], args.rounds)
        eight = race(contestants, batches, args.rounds)
        same = {
            dtype: f"{sum(_same(llm, each) for each in batches)}/{8 * len(batches)}"
            for dtype, llm in llms.items()
        }
    ratios = {
        f"{name}: {dtype} / {args.dtypes[0]}": speeds[dtype] / speeds[args.dtypes[0]]
        for name, speeds in {"batch 1": one, "batch 8": eight}.items()
        for dtype in args.dtypes[1:]
    }
    return {"tokens_per_second": {"batch 1": one, "batch 8": eight}, **ratios, "same alone": same}


def _same(llm: LLM, batch: Rows) -> int:
    """How many requests of a batch get the text that they get alone. All are seeded alike: greedy."""
    together = run_prompts(llm, batch, temperature=0)
    alone = [run_prompts(llm, [row], temperature=0)[0] for row in batch]
    return sum(a.token_ids == b.token_ids for a, b in zip(together, alone, strict=True))


def race_drafts(args: argparse.Namespace, mixed: Rows) -> dict[str, Any]:
    """A chain against plain decoding and transformers."""
    on = "chain (5, 1, 6)"
    with ExitStack() as stack:
        off = specserve_contestant(stack.enter_context(LLM(cpu_threads=args.threads)))
        chain = specserve_contestant(stack.enter_context(LLM(cpu_threads=args.threads, **CHAIN)))
        single = {"off": off, on: chain, "transformers": transformers_contestant()}
        one = race(single, [[row] for row in mixed[: args.prompts]], args.rounds)
        eight = race({"off": off, on: chain}, [mixed[i : i + 8] for i in (0, 8, 16)], args.rounds)
    return {
        "tokens_per_second": {"batch 1": one, "batch 8": eight},
        "batch 1: on / off": one[on] / one["off"],
        "batch 8: on / off": eight[on] / eight["off"],
        "batch 1: on / transformers": one[on] / one["transformers"],
        "batch 1: off / transformers": one["off"] / one["transformers"],
    }


def main() -> None:
    """Speed on a CPU as ratios within one run: speculation against plain decoding and ``transformers.generate``, or
    plain decoding in several dtypes against each other.

        python -m benchmarks.cpu_speed [--rounds 3] [--prompts 12]
        python -m benchmarks.cpu_speed --dtypes float32 bfloat16 [--model-path MODEL] [--threads 1]

    Half of the held-out prompts are dialogues, half code; greedy. The contestants take turns, prompt by prompt at
    batch 1 and batch by batch at batch 8, so that other load on the machine affects all alike.
    """
    parser = options(main.__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--dtypes", nargs="+", help="race these in place of drafts")
    parser.add_argument("--model-path", default=str(BUNDLED_MODEL), help="with --dtypes")
    parser.add_argument("--threads", type=int, help="default: the number that makes a step fastest")
    args = parser.parse_args()
    rows = load_prompts()
    mixed = [row for pair in zip(rows[:50], rows[50:], strict=True) for row in pair]
    figures = (race_dtypes if args.dtypes else race_drafts)(args, mixed)
    figures["threads"] = torch.get_num_threads()
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(write_results("cpu_dtypes" if args.dtypes else "cpu_speed", figures, args.output))


SHAPE = [
    "--speculative-num-steps",
    "5",
    "--speculative-eagle-topk",
    "1",
    "--speculative-num-draft-tokens",
    "6",
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


async def one_by_one(url: str, raws: Sequence[bytes]) -> list[Reply]:
    connection = Connection(url)
    found = [await connection.send(raw) for raw in raws]
    connection.close()
    return found


async def at_once(url: str, raws: Sequence[bytes]) -> list[Reply]:
    return await asyncio.gather(*(send_once(url, raw) for raw in raws))


def usages(replies: Sequence[Reply]) -> list[dict[str, Any]]:
    """The usage object that ends each stream."""
    return [reply.events()[-1]["usage"] for reply in replies]


def measure_prefix(server: Server, raws: Sequence[bytes]) -> dict[str, list[Reply]]:
    """Both ways to send the requests, each to an empty cache, after one that warms the server up."""
    asyncio.run(one_by_one(server.url, raws[:1]))
    ask_once(server.url, "/flush_cache", b"")
    found = {"one by one": asyncio.run(one_by_one(server.url, raws))}
    ask_once(server.url, "/flush_cache", b"")
    return {**found, "at once": asyncio.run(at_once(server.url, raws))}


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
    found = [[usage["speculation"] for usage in usages(replies)] for replies in cached.values()]
    return sum(a != b for each in found for a, b in zip(each, expected, strict=True))


def prefix() -> None:
    """Time to first token of requests that share a long system prompt, with and without the prefix cache.

        python -m benchmarks.cpu_speed prefix [--requests 64] [--system-tokens 2000]

    Two servers of the bundled model with EAGLE-3's chain (5, 1, 6) on one engine thread, one of them without a
    prefix cache, answer the same chats one by one, and all at once. The server with a cache gets them at once
    twice: first with an empty cache, so that the first request computes what the others wait for, then again.
    Acceptance must be the same everywhere.
    """
    parser = options(prefix.__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--system-tokens", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32", choices=["float64", "float32"])
    args = parser.parse_args()
    given = settings(args)
    raws = make_requests(make_chats(args.requests, args.system_tokens), args.max_tokens)
    pool = str(args.requests * (args.system_tokens + 512))
    flags = ["--dtype", args.dtype, "--speculative-algorithm", "EAGLE3", *SHAPE, "--max-total-tokens", pool]
    flags += ["--max-running-requests", str(args.requests)]
    with serving(*flags) as server:
        cached = measure_prefix(server, raws)
        cached["at once again"] = asyncio.run(at_once(server.url, raws))
    with serving(*flags, "--disable-radix-cache") as server:
        cold = measure_prefix(server, raws)
    found = {
        "with the prefix cache": {name: figures_of(replies) for name, replies in cached.items()},
        "without": {name: figures_of(replies) for name, replies in cold.items()},
        "times sooner": prefix_ratios(cached, cold),
        "answers": sum(map(len, cached.values())),
        "answers accepted otherwise": acceptance_differs(cached, cold),
    }
    show(found)
    print(write_results("prefix", {**given, **found}, args.output))
    missed = [name for name, times in found["times sooner"].items() if times < TARGET]
    raise SystemExit(1 if missed or found["answers accepted otherwise"] else 0)


if __name__ == "__main__":
    run_command(main, prefix)
