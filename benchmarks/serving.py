"""Load OpenAI-compatible servers over HTTP with streaming, as their users do."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

from benchmarks.http_client import Connection, Reply, closed_loop, open_loop, request, send_once
from benchmarks.results import ROOT, Figures, interval, options, ratios, run_command, spread, write_results

HELD_OUT = ROOT / "examples" / "bundled_model" / "prompts.jsonl"
SIZES = {"sharegpt": (215, 198), "fixed": (512, 256)}
"""Mean tokens of prompts and answers. ShareGPT's are of the 1,000 conversations that other benchmarks take."""
LOGNORMAL = (1.1, 0.9)
MOST_PROMPT, MOST_TOKENS = 1024, 2048
TURNS = 6
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": description, "parameters": PATH}}
    for name, description in {"read_file": "Read a file.", "list_files": "List a directory."}.items()
]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one process: ``requests`` that ``clients`` take turns at, or ``rate`` arrivals a second for
    ``seconds``. An agent's session counts as one. ``characters``: of a token; ``key``: a header's line."""

    url: str
    model: str
    prompts: str
    lengths: str
    prompt_tokens: int
    new_tokens: int
    characters: float
    vocab: int
    fields: Mapping[str, Any]
    key: str
    seed: int = 0
    clients: int = 0
    requests: int = 0
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
    def end(self) -> float:
        return self.at + self.last

    @property
    def per_token(self) -> float:
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0

    def within(self, begin: float, end: float) -> float:
        """Tokens that came between these times, if they came evenly after the first."""
        first, seconds = self.at + self.first, self.last - self.first
        overlap = max(0.0, min(self.end, end) - max(first, begin))
        return self.tokens * overlap / seconds if seconds else self.tokens * (begin < first <= end)


Outcome = tuple[float, Reply | str]
"""When a request was sent, and the reply or what failed."""
Session = Generator[Mapping[str, Any], Outcome, None]
"""The fields of a client's requests, each after the outcome of the one before."""


@cache
def held_out() -> list[str]:
    """Questions and the beginnings of code, in the order of the file."""
    rows = map(json.loads, HELD_OUT.read_text().splitlines())
    return [row["prompt"] if "prompt" in row else row["messages"][0]["content"] for row in rows]


def text(rng: random.Random, characters: int) -> str:
    """The end of held-out prompts one after the other, so that the answer is to the last of them."""
    joined = rng.choice(held_out())
    while len(joined) < characters:
        joined = f"{rng.choice(held_out())}\n\n{joined}"
    return joined[-characters:]


def sizes(load: Load, rng: random.Random) -> list[int]:
    """Tokens of a prompt and its answer."""
    means = [load.prompt_tokens, load.new_tokens]
    if load.lengths == "fixed":
        return means
    drawn = [m * rng.lognormvariate(-s * s / 2, s) for m, s in zip(means, LOGNORMAL, strict=True)]
    prompt = min(max(4, int(drawn[0])), MOST_PROMPT)
    return [prompt, min(max(4, int(drawn[1])), MOST_TOKENS - prompt)]


def one_request(load: Load, rng: random.Random) -> Session:
    prompt, new = sizes(load, rng)
    fields = {"max_tokens": new, "ignore_eos": True, **load.fields}
    if load.prompts == "ids":
        ids = [rng.randrange(load.vocab // 2, load.vocab) for _ in range(prompt)]
        yield {"prompt": ids, **fields}
    else:
        yield {"messages": [user(text(rng, round(prompt * load.characters)))], **fields}


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def agent(load: Load, rng: random.Random) -> Session:
    """A task, and after each answer the file that it should have asked for: the prefix grows to the end."""
    messages: list[dict[str, Any]] = [user(text(rng, round(load.prompt_tokens * load.characters)))]
    for turn in range(TURNS):
        outcome = yield {"messages": messages, "tools": TOOLS, "max_tokens": load.new_tokens, **load.fields}
        if not isinstance(outcome[1], Reply) or outcome[1].status != 200:
            return
        deltas = [c["delta"] for event in outcome[1].events() for c in event.get("choices", ())]
        function = {"name": "read_file", "arguments": json.dumps({"path": f"part_{turn}.py"})}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        said = "".join(delta.get("content") or "" for delta in deltas)
        file = text(rng, round(rng.uniform(0.5, 1.5) * load.prompt_tokens * load.characters))
        messages += [
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": file},
        ]


def from_file(load: Load) -> Iterator[Session]:
    """A request for each line, over and over. Other processes and seeds begin elsewhere."""
    rows = [json.loads(row) for row in Path(load.prompts).read_text().splitlines() if row]
    begin = random.Random(load.seed).randrange(len(rows))

    def session(fields: Mapping[str, Any]) -> Session:
        yield {"max_tokens": load.new_tokens, "ignore_eos": True, **load.fields, **fields}

    return map(session, cycle(rows[begin:] + rows[:begin]))


def sessions(load: Load) -> Iterator[Session]:
    if load.prompts not in PROMPTS:
        return from_file(load)
    make = agent if load.prompts == "agent" else one_request
    return (make(load, random.Random(f"{load.seed} {number}")) for number in count())


PROMPTS = ("text", "agent", "ids")


def raw(load: Load, fields: Mapping[str, Any]) -> bytes:
    end = "completions" if "prompt" in fields else "chat/completions"
    body = json.dumps({"model": load.model, **fields, **STREAMED}).encode()
    return request(f"{urlsplit(load.url).path.rstrip('/')}/v1/{end}", body, load.key)


async def hold(connection: Connection, load: Load, session: Session) -> list[Outcome]:
    """Send the requests of a session."""
    outcomes: list[Outcome] = []
    fields = next(session)
    while True:
        sent, at = raw(load, fields), time.time()
        try:
            outcomes.append((at, await connection.send(sent)))
        except (OSError, EOFError, ValueError) as error:
            outcomes.append((at, f"{type(error).__name__}: {error}"))
        try:
            fields = session.send(outcomes[-1])
        except StopIteration:
            return outcomes


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

    async def work(connection: Connection, session: Session) -> list[Outcome]:
        return await hold(connection, load, session)

    if load.clients:
        shared = islice(sessions(load), load.requests)
        sending = closed_loop(load.url, load.clients, lambda _: shared, work)
    else:
        arrivals = random.Random(load.seed)
        sending = open_loop(load.url, load.rate, load.seconds, sessions(load), work, arrivals)
    return [read(outcome) for outcomes in asyncio.run(sending) for outcome in outcomes]


@dataclass(slots=True)
class Measured:
    """What rounds of a load gave. ``rates``: tokens a second of each; ``answers``: those that count."""

    rates: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, answers: Sequence[Answer], clients: int) -> None:
        """Of a closed loop with three rounds or more, the first and the last do not count. Tokens do from the middle of
        the first round's ends to that of the last but one: where all end together, that is a whole number of rounds."""
        good = [answer for answer in answers if answer.error is None]
        self.errors += [answer.error for answer in answers if answer.error is not None]
        if not good:
            return
        ends = sorted(answer.end for answer in good)
        begin, end, half = min(answer.at for answer in good), ends[-1], clients // 2
        counted = good
        if clients and len(ends) >= 3 * clients:
            begin, end = ends[half], ends[-clients - half]
            counted = sorted(good, key=lambda answer: answer.at)[clients:-clients]
        self.answers += counted
        self.rates.append(sum(answer.within(begin, end) for answer in good) / (end - begin))

    def figures(self, slo_ttft: float, slo_tpot: float) -> Figures:
        good = [a for a in self.answers if 1e3 * a.first <= slo_ttft and 1e3 * a.per_token <= slo_tpot]
        return {
            "requests": len(self.answers),
            "failed": len(self.errors),
            "errors": self.errors[:3],
            "tokens_per_second": fmean(self.rates or [0.0]),
            "interval": interval(self.rates),
            "goodput": len(good) / max(1, len(self.answers)),
            "ttft_ms": spread([1e3 * answer.first for answer in self.answers]),
            "tpot_ms": spread([1e3 * answer.per_token for answer in self.answers]),
            "gap_ms": spread([1e3 * gap for answer in self.answers for gap in answer.gaps]),
            "end_to_end_ms": spread([1e3 * answer.last for answer in self.answers]),
        }


def parts(load: Load, processes: int, seed: int) -> list[Load]:
    """The load of each process."""
    split = [len(range(i, load.clients, processes)) for i in range(processes)]
    each = load.requests // load.clients if load.clients else 0
    return [
        replace(load, clients=n, requests=n * each, rate=load.rate / processes, seed=seed + i)
        for i, n in enumerate(split)
        if n or load.rate
    ]


def measure(
    pool: ProcessPoolExecutor, loads: Mapping[str, Load], seed: int, args: argparse.Namespace
) -> dict[str, Figures]:
    """Rounds of one load on each server in turn, with the same requests, until the intervals are narrow."""
    measured = {name: Measured() for name in loads}
    for number in range(args.repeats):
        for name, load in loads.items():
            each = pool.map(run, parts(load, args.processes, seed + 100 * number))
            measured[name].add([answer for answers in each for answer in answers], load.clients)
        rates = [each.rates for each in measured.values()]
        wide = [interval(values) for values in [*rates, *(ratios(rates[0], other) for other in rates[1:])]]
        if number >= 2 and all(width is not None and width < NARROW for width in wide):
            break
    figures = {name: each.figures(args.slo_ttft, args.slo_tpot) for name, each in measured.items()}
    for name, each in list(measured.items())[1:]:
        values = ratios(rates[0], each.rates)
        figures[name] |= {"ratio": fmean(values or [0.0]), "ratio_interval": interval(values)}
    return figures


NARROW = 0.02
ROWS = (
    ("ttft_ms", "first token"),
    ("tpot_ms", "ms a token"),
    ("end_to_end_ms", "end to end"),
    ("gap_ms", "gap"),
)


def table(load: str, figures: Mapping[str, Figures]) -> str:
    """The figures of all servers next to each other, each with its ratio to the first."""
    first = next(iter(figures.values()))
    lines = [" ".join([f"{load:24}", *(f"{name:>22}" for name in figures)])]

    def row(name: str, values: Sequence[float], rest: Sequence[str]) -> None:
        cells = [f"{value:12.5g} {more:>9}" for value, more in zip(values, rest, strict=True)]
        lines.append(" ".join([f"  {name:22}", *cells]))

    each = list(figures.values())
    row("tokens/s", [f["tokens_per_second"] for f in each], [percent(f["interval"]) for f in each])
    if len(each) > 1:
        row("ratio", [f.get("ratio", 1) for f in each], [percent(f.get("ratio_interval")) for f in each])
    for key, name in ROWS:
        shown = [which for which in first[key] if which != "mean"]
        for which in shown[:3] if "p99" in shown else shown:
            values = [f[key].get(which, 0.0) for f in each]
            row(f"{name}, {which}", values, ["", *(f"x {v / (values[0] or 1):.3f}" for v in values[1:])])
    row("goodput", [f["goodput"] for f in each], [f"of {f['requests']}" for f in each])
    failed = [f"{name}: {error}" for name, f in figures.items() for error in f["errors"]]
    return "\n".join([*lines, *failed])


def percent(width: float | None) -> str:
    return "" if width is None else f"±{100 * width:.1f}%"


def ask(url: str, path: str, key: str, fields: object = None) -> Any:
    """The answer outside a load. Raises SystemExit for an error."""
    body = None if fields is None else json.dumps(fields).encode()
    try:
        reply = asyncio.run(send_once(url, request(urlsplit(url).path.rstrip("/") + path, body, key)))
    except OSError as error:
        raise SystemExit(f"{url}: {error}") from None
    if reply.status != 200:
        raise SystemExit(f"{url}{path}: {reply.status} {reply.body[:200].decode(errors='replace')}")
    return reply.json()


def load_of(url: str, args: argparse.Namespace) -> Load:
    """What all loads of a server have in common."""
    key = f"authorization: Bearer {args.api_key}\r\n" if args.api_key else ""
    model, characters = args.model or ask(url, "/v1/models", key)["data"][0]["id"], 0.0
    if args.prompts in ("text", "agent"):
        sample = text(random.Random(0), 2000)
        counted = ask(url, "/v1/completions", key, {"model": model, "prompt": sample, "max_tokens": 1})
        characters = len(sample) / counted["usage"]["prompt_tokens"]
    prompt, new = SIZES[args.lengths]
    fields = {"temperature": args.temperature, **args.fields}
    return Load(
        url,
        model,
        args.prompts,
        args.lengths,
        args.prompt_tokens or prompt,
        args.new_tokens or new,
        characters,
        args.vocab,
        fields,
        key,
    )


def loads(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Load]]]:
    """Each load by name, of each server."""
    servers = [named.rpartition("=")[::2] for named in args.url]
    base = {name or url: load_of(url, args) for name, url in servers}
    if args.rate:
        steps = [(f"{rate:g} requests/s", {"rate": rate, "seconds": args.seconds}) for rate in args.rate]
    else:
        steps = [(f"{n} clients", {"clients": n, "requests": n * args.rounds}) for n in args.clients]
    for name, fields in steps:
        yield name, {server: replace(load, **fields) for server, load in base.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Load OpenAI-compatible servers over HTTP with streaming, as their users do.

        python -m benchmarks.serving --url [NAME=]http://127.0.0.1:30000 [NAME=URL ...] [--clients 1 16 64]
            [--rounds 4] [--rate 4 8] [--seconds 60] [--prompts text|agent|ids|FILE] [--lengths sharegpt|fixed]
            [--temperature 0] [--output FILE]

    Imports only the standard library, so that the same script measures every server. Several servers, which may share
    a GPU, are measured in turn with the same requests, and their figures printed next to each other.

    Closed loop: ``--clients`` send their next request when the last is answered, ``--rounds`` times each on average. Of
    three rounds or more the first and the last do not count. Open loop: requests arrive at
    ``--rate`` a second, at random (Poisson), for ``--seconds``. A load is repeated, three times at least and
    ``--repeats`` at most, until the 95% confidence intervals of tokens a second, and of ratios between servers, are
    below 2%.

    *text*: a message of held-out questions and beginnings of code, the last of which is to be answered. *agent*: such
    a task with tools, then after each of five answers a file; the prefix grows, and answers end by themselves. *ids*:
    random token ids, which nobody sends. *FILE*: JSON lines of requests (``prompt`` or ``messages``,
    and what else they hold). Prompts differ in all requests but those of a file. ``sharegpt``: lengths with the means
    and the spread of ShareGPT's conversations (log-normal; prompts up to 1,024 tokens, 2,048 in all).

    The first token's time is from sending a request. A chunk of a stream may hold several tokens: a *gap* is the time
    between chunks; ms a token are a request's time after the first token divided by its other tokens. The 99th
    percentile is shown of 300 values or more, else the 95th and the maximum. Goodput is the share of requests whose
    first token and ms a token are within ``--slo-ttft`` and ``--slo-tpot`` milliseconds. Exits with 1 if any failed.
    """
    parser = options(main.__doc__)
    add = parser.add_argument
    add("--url", nargs="+", default=["http://127.0.0.1:30000"], help="without /v1; NAME=URL names it")
    add("--model", help="default: the first that a server lists")
    add("--api-key")
    add("--clients", type=int, nargs="+", default=[1, 16, 64])
    add("--rounds", type=int, default=4, help="requests of a client in a repeat")
    add("--rate", type=float, nargs="+", help="requests a second, instead of --clients")
    add("--seconds", type=float, default=60.0, help="that requests arrive at a rate")
    add("--repeats", type=int, default=8, help="at most")
    add("--prompts", default="text", help="text, agent, ids, or a file")
    add("--lengths", choices=SIZES, default="sharegpt")
    add("--prompt-tokens", type=int, help="mean; default: 215, fixed 512")
    add("--new-tokens", type=int, help="mean; default: 198, fixed 256")
    add("--temperature", type=float, default=0.0)
    add("--fields", type=json.loads, default={}, help="more fields of each request, as JSON")
    add("--seed", type=int, help="of the requests; default: the clock, so that no server has cached them")
    add("--vocab", type=int, default=32000, help="of ids, which are from its upper half")
    add("--processes", type=int, default=4, help="that the clients are spread over")
    add("--slo-ttft", type=float, default=500.0)
    add("--slo-tpot", type=float, default=50.0)
    args = parser.parse_args(argv)
    if args.prompts not in PROMPTS and not Path(args.prompts).is_file():
        parser.error(f"--prompts: text, agent, ids or a file, found {args.prompts!r}")
    rows: dict[str, dict[str, Figures]] = {}
    begin = time.time_ns() if args.seed is None else args.seed
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        for number, (name, servers) in enumerate(loads(args)):
            rows[name] = measure(pool, servers, begin + 10**6 * number, args)
            print(table(name, rows[name]), flush=True)
    if args.output is not None:
        write_results("serving", rows, args.output)
    return int(any(figures["failed"] for row in rows.values() for figures in row.values()))


if __name__ == "__main__":
    run_command(main)
