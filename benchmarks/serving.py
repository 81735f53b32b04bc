"""Load any OpenAI-compatible server over HTTP with streaming, as its users do; or an ``LLM`` with the same requests."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.http_client import Connection, Reply, closed_loop, open_loop, request
from benchmarks.results import Figures, options, run_command, show, spread, write_results

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
]


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one process: ``clients`` that send ``rounds`` requests each, or ``rate`` requests per second."""

    url: str
    model: str
    prompt_tokens: int
    new_tokens: int
    spread: bool
    text: bool
    vocab: int
    seed: int
    api_key: str | None
    clients: int = 0
    rounds: int = 0
    rate: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class Answer:
    """Seconds: when the request was sent, then from there to the first token and the end, and between chunks."""

    at: float
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None

    @property
    def per_token(self) -> float:
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0


def bodies(load: Load, client: int) -> Iterator[bytes]:
    """The requests of a client, without end."""
    rng = random.Random(f"{load.seed} {client}")
    while True:
        sizes = [load.prompt_tokens, load.new_tokens]
        if load.spread:
            drawn = [n * rng.lognormvariate(-s * s / 2, s) for n, s in zip(sizes, (1.1, 0.9), strict=True)]
            sizes = [max(4, int(size)) for size in drawn]
        prompt: Any = [rng.randrange(load.vocab // 2, load.vocab) for _ in range(sizes[0])]
        if load.text:
            prompt = " ".join(rng.choices(WORDS, k=sizes[0]))
        fields = {"model": load.model, "prompt": prompt, "max_tokens": sizes[1], "ignore_eos": True}
        streamed = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        yield json.dumps({**fields, **streamed}).encode()


Outcome = tuple[float, Reply | str]
"""When a request was sent, and the reply or what failed."""


async def ask(connection: Connection, load: Load, sent: bytes) -> Outcome:
    key = f"authorization: Bearer {load.api_key}\r\n" if load.api_key else ""
    path = urlsplit(load.url).path.rstrip("/") + "/v1/completions"
    at = time.time()
    try:
        return at, await connection.send(request(path, sent, key))
    except (OSError, EOFError, ValueError) as error:
        return at, f"{type(error).__name__}: {error}"


def read(outcome: Outcome) -> Answer:
    """Tokens and times of a stream. It is read after the load, which it would slow down."""
    at, reply = outcome
    answer = Answer(at)
    try:
        if isinstance(reply, str):
            raise ValueError(reply)
        if reply.status != 200:
            raise ValueError(f"{reply.status} {reply.body[:200].decode(errors='replace')}")
        for now, event in reply.timed_events():
            if event.get("error"):
                raise ValueError(str(event["error"]))
            if event.get("choices"):
                if answer.first:
                    answer.gaps.append(now - answer.last)
                answer.first, answer.last = answer.first or now, now
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
    except ValueError as error:
        answer.error = str(error)
    return answer


def run(load: Load) -> list[Answer]:
    """The load of one process."""

    def work(connection: Connection, sent: bytes) -> Awaitable[Outcome]:
        return ask(connection, load, sent)

    if load.clients:

        def jobs(client: int) -> Iterator[bytes]:
            return islice(bodies(load, client), load.rounds)

        sending = closed_loop(load.url, load.clients, jobs, work)
    else:
        arrivals = random.Random(load.seed)
        sending = open_loop(load.url, load.rate, load.seconds, bodies(load, 0), work, arrivals)
    return [*map(read, asyncio.run(sending))]


def summary(answers: Sequence[Answer], slo_ttft: float, slo_tpot: float) -> Figures:
    good = [answer for answer in answers if answer.error is None]
    begin = min(answer.at for answer in answers)
    seconds = max((answer.at + answer.last for answer in good), default=begin) - begin or 1e-9
    within = [a for a in good if 1e3 * a.first <= slo_ttft and 1e3 * a.per_token <= slo_tpot]
    return {
        "requests": len(answers),
        "errors": [answer.error for answer in answers if answer.error is not None][:3],
        "failed": len(answers) - len(good),
        "seconds": seconds,
        "tokens_per_second": sum(answer.tokens for answer in good) / seconds,
        "requests_per_second": len(good) / seconds,
        "goodput_per_second": len(within) / seconds,
        "ttft_ms": spread([1e3 * answer.first for answer in good]),
        "tpot_ms": spread([1e3 * answer.per_token for answer in good]),
        "gap_ms": spread([1e3 * gap for answer in good for gap in answer.gaps]),
        "end_to_end_ms": spread([1e3 * answer.last for answer in good]),
    }


def loads(args: argparse.Namespace) -> Iterator[tuple[str, list[Load]]]:
    """Each load by name, in the parts that processes run."""
    names = ("url", "model", "prompt_tokens", "new_tokens", "text", "vocab", "api_key")
    common = {name: getattr(args, name) for name in names} | {"spread": args.lengths == "sharegpt"}
    for clients in args.clients if not args.rate else []:
        parts = [len(range(i, clients, args.processes)) for i in range(args.processes)]
        seeds = enumerate(filter(None, parts), 1000 * (clients + 1))
        yield (
            f"{clients}",
            [Load(**common, seed=seed, clients=part, rounds=args.rounds) for seed, part in seeds],
        )
    for rate in args.rate or []:
        arrivals = {"rate": rate / args.processes, "seconds": args.seconds}
        yield f"{rate:g}/s", [Load(**common, seed=i, **arrivals) for i in range(args.processes)]


def main(argv: Sequence[str] | None = None) -> None:
    """Load any OpenAI-compatible server over HTTP with streaming, as its users do.

        python -m benchmarks.serving --url http://127.0.0.1:30000 --model NAME [--clients 1 16 64] [--rounds 8]
            [--rate 4 8] [--prompt-tokens 512] [--new-tokens 256] [--lengths fixed|sharegpt] [--text] [--json FILE]

    Imports only the standard library, so that the same script measures every server. Closed loop: each of
    ``--clients`` sends its next request when the last is answered, ``--rounds`` times. Open loop: requests arrive
    at ``--rate`` per second, at random (Poisson), for ``--seconds``. Prompts are random token ids, or with
    ``--text`` random words, all different so that no prefix is cached. ``sharegpt``: lengths around
    ``--prompt-tokens`` and ``--new-tokens`` with the spread of conversations (log-normal, sigma 1.1 and 0.9).

    TTFT is from sending a request to its first token. A chunk of a stream may hold several tokens: ``gap`` is the
    time between chunks, TPOT a request's time after the first token divided by its other tokens. Goodput counts the
    requests whose TTFT and TPOT are within ``--slo-ttft`` and ``--slo-tpot`` milliseconds.
    """
    parser = options(main.__doc__, output=False)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:30000", help="without /v1")
    add("--model", required=True)
    add("--api-key")
    add("--clients", type=int, nargs="+", default=[1, 16, 64])
    add("--rounds", type=int, default=8, help="requests of a client")
    add("--rate", type=float, nargs="+", help="requests a second, instead of --clients")
    add("--seconds", type=float, default=60.0, help="that requests arrive at a rate")
    add("--prompt-tokens", type=int, default=512)
    add("--new-tokens", type=int, default=256)
    add("--lengths", choices=("fixed", "sharegpt"), default="fixed")
    add("--text", action="store_true", help="prompts of words, for servers that take no ids")
    add("--vocab", type=int, default=32000, help="token ids are from its upper half")
    add("--processes", type=int, default=4, help="that the clients are spread over")
    add("--slo-ttft", type=float, default=500.0)
    add("--slo-tpot", type=float, default=50.0)
    add("--json", type=Path)
    args = parser.parse_args(argv)
    rows: dict[str, Figures] = {}
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        for name, parts in loads(args):
            answers = [answer for part in pool.map(run, parts) for answer in part]
            rows[name] = summary(answers, args.slo_ttft, args.slo_tpot)
            show({name: rows[name]})
            for error in rows[name]["errors"]:
                print(error, file=sys.stderr)
    if args.json is not None:
        given = {name: value for name, value in vars(args).items() if name not in ("api_key", "json")}
        args.json.write_text(json.dumps({"given": given, "loads": rows}, indent=1, default=str) + "\n")


RUNNING = 256


def measure_llm(llm: Any, clients: int, rounds: int, args: argparse.Namespace) -> Figures:
    """Tokens and seconds of all rounds, prompts included."""
    from specserve import SamplingParams

    rng = random.Random(clients)
    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)
    tokens, seconds = 0, 0.0
    for _ in range(rounds):
        prompts = [
            rng.choices(range(args.vocab // 2, args.vocab), k=args.prompt_tokens) for _ in range(clients)
        ]
        begin = time.perf_counter()
        tokens += sum(len(output.token_ids) for output in llm.generate(prompts, params))
        seconds += time.perf_counter() - begin
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def in_process() -> None:
    """The requests of ``benchmarks.serving`` through ``LLM.generate``: what a server over HTTP is held against.

        python -m benchmarks.serving in_process --model DIR/target --eagle3 DIR/eagle3 [--shape adaptive]
            [--clients 1 16 64]

    Each of ``--rounds`` calls has one prompt for each client. At most 256 run at a time, and for more clients than
    that there is one call. Prompts are random, all different.
    """
    from benchmarks.startup import settings_of
    from specserve import LLM

    parser = options(in_process.__doc__)
    add = parser.add_argument
    add("--model", required=True)
    add("--eagle3", required=True)
    add("--shape", default="adaptive", help="adaptive, off, or steps,topk,tokens")
    add("--clients", type=int, nargs="+", default=[1, 16, 64, 128, 256, 1000])
    add("--rounds", type=int, default=8, help="one for more clients than run at a time")
    add("--prompt-tokens", type=int, default=512)
    add("--new-tokens", type=int, default=256)
    add("--vocab", type=int, default=3000, help="token ids are from its upper half")
    args = parser.parse_args()
    rows = {}
    settings = settings_of(args, args.shape)
    with LLM(max_running_requests=RUNNING, disable_radix_cache=True, **settings) as llm:
        measure_llm(llm, 1, 1, args)
        for clients in args.clients:
            rows[clients] = measure_llm(llm, clients, args.rounds if clients <= RUNNING else 1, args)
            print(f"{args.shape} {clients:5}: {rows[clients]['tokens_per_second']:7.0f} tokens/s", flush=True)
    write_results("in_process", {"shape": args.shape, "clients": rows}, args.output)


if __name__ == "__main__":
    run_command(main, in_process)
