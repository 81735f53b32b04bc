"""How many GPUs serve how much: replicas behind the prefix router, simulated from the step costs of one."""

from __future__ import annotations

import asyncio
import heapq
import json
import math
import random
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, count, pairwise
from statistics import fmean

from benchmarks.http_client import Connection, Reply, as_json, request
from benchmarks.results import ROOT, Figures, options, percentile, run_command, show, write_results
from benchmarks.serving import LOGNORMAL, SIZES
from examples.ray_serve.prefix import rank
from tests.front.processes import Server

MEASURED = ROOT / "benchmarks" / "results" / "adaptive_h200.json"
PROMPT = 185.3e-3 / (16 * 512)  # seconds of a prompt's token: prefill.json, 16 prompts of 512
LAUNCH = 13.4e-3 - 512 * PROMPT  # of one prompt of 512, beside its tokens
GPUS = (1, 8, 100, 1000)
CELL = 100  # replicas that one router chooses from; several cells are chosen from in the same way
WARM, COUNTED = 3.0, 300.0  # seconds simulated without counting, and of all GPUs together with, from 2 to 60
LOAD = 0.7  # of the tokens/s that a replica gives at its largest batch


@dataclass(frozen=True, slots=True)
class Costs:
    """A replica's costs. ``token``: seconds from a token to the next by number of requests, rising, drafts included.
    Prompts take ``launch`` together and ``prompt`` for each token, at most ``chunk``, and running requests wait."""

    token: Sequence[tuple[int, float]]
    prompt: float
    launch: float
    chunk: int = 8192

    @property
    def most(self) -> int:
        return self.token[-1][0]

    def at(self, requests: int) -> float:
        """Between two measured numbers, on the line that joins them."""
        place = bisect_left(self.token, (requests, 0.0))
        (above, slow), (below, fast) = (
            self.token[min(place, len(self.token) - 1)],
            self.token[max(0, place - 1)],
        )
        return slow if above <= below else fast + (slow - fast) * (requests - below) / (above - below)


@dataclass(eq=False, slots=True)
class Request:
    """``shared``: tokens of its prompt's beginning, which others with the same ``prefix`` have too."""

    prefix: str
    shared: int
    own: int
    new: int
    at: float = 0.0
    first: float = 0.0
    end: float = 0.0
    cached: bool = False


@dataclass(eq=False, slots=True)
class Replica:
    """``running``: requests and their tokens left; ``begin``: those whose prompts are computed until ``until``; if
    there are none, steps of ``step`` seconds run since ``begun``."""

    waiting: deque[Request] = field(default_factory=deque)
    running: dict[Request, int] = field(default_factory=dict)
    begin: list[Request] = field(default_factory=list)
    prefixes: set[str] = field(default_factory=set)
    begun: float = 0.0
    step: float = 0.0
    until: float = math.inf

    def launch(self, now: float, costs: Costs) -> None:
        """Begin prompts, after a step for those that run, or as many steps as there are until a request ends."""
        room, tokens = costs.most - len(self.running), 0
        if self.begin and self.running:
            room = 0
        self.begin = []
        while self.waiting and len(self.begin) < room and tokens < costs.chunk:
            each = self.waiting.popleft()
            each.cached = each.prefix in self.prefixes
            self.prefixes.add(each.prefix)
            tokens += each.own + (0 if each.cached else each.shared)
            self.begin.append(each)
        self.begun = now
        if self.begin:
            self.step = costs.launch + tokens * costs.prompt
            self.until = now + self.step
        elif self.running:
            self.step = costs.at(len(self.running))
            self.until = now + self.step * (1 if self.waiting else min(self.running.values()))
        else:
            self.until = math.inf

    def arrive(self, each: Request, now: float) -> None:
        """Queue a request. It is seen after the step under way."""
        self.waiting.append(each)
        if self.until == math.inf:
            self.until = now
        elif self.running and not self.begin:
            steps = max(1, math.ceil((now - self.begun) / self.step - 1e-9))
            self.until = min(self.until, self.begun + steps * self.step)

    def land(self, now: float) -> list[Request]:
        """Give the tokens of what ended now: the first of each prompt, or those of steps. Return the requests that
        ended."""
        if self.begin:
            self.running |= {each: each.new for each in self.begin}
        steps = 1 if self.begin else round((now - self.begun) / self.step) if self.running else 0
        ended = []
        for each in self.begin or list(self.running):
            each.first = each.first or now
            self.running[each] -= steps
            if self.running[each] <= 0:
                del self.running[each]
                each.end = now
                ended.append(each)
        return ended


def simulate(
    costs: Costs,
    replicas: Sequence[str],
    begin: Sequence[Request],
    follow: Callable[[Request], Request | None],
    route: Callable[[str, dict[str, int]], str],
) -> list[Request]:
    """Serve requests until none is left; ``follow`` gives the one that a client sends after another. Return them in the
    order of their ends."""
    fleet = {name: Replica() for name in replicas}
    loads, numbers, done = dict.fromkeys(fleet, 0), count(), list[Request]()
    events: list[tuple[float, int, Request | str]] = [(each.at, next(numbers), each) for each in begin]
    heapq.heapify(events)
    while events:
        now, _, what = heapq.heappop(events)
        if isinstance(what, Request):
            name = route(what.prefix, loads)
            fleet[name].arrive(what, now)
            loads[name] += 1
        else:
            name = what
            if fleet[name].until != now:
                continue  # an arrival has cut it short
            for each in fleet[name].land(now):
                loads[name] -= 1
                done.append(each)
                if (after := follow(each)) is not None:
                    heapq.heappush(events, (after.at, next(numbers), after))
            fleet[name].launch(now, costs)
        if fleet[name].until < math.inf:
            heapq.heappush(events, (fleet[name].until, next(numbers), name))
    return done


def by_prefix(prefix: str, loads: dict[str, int]) -> str:
    return rank(prefix, loads)[0]


def by_cell(names: Sequence[str]) -> Callable[[str, dict[str, int]], str]:
    """Return what chooses a cell by prefix and load, and then a replica in it."""
    cells = {str(at): names[at : at + CELL] for at in range(0, len(names), CELL)}

    def route(prefix: str, loads: dict[str, int]) -> str:
        cell = by_prefix(prefix, {each: sum(loads[name] for name in own) for each, own in cells.items()})
        return by_prefix(prefix, {name: loads[name] for name in cells[cell]})

    return route


def figures_of(done: Sequence[Request], begin: float = -math.inf, end: float = math.inf) -> Figures:
    """Of requests that came within these times; tokens/s of those that ended within them."""
    came = [each for each in done if begin <= each.at < end]
    begin, last = max(begin, min(each.at for each in done)), min(end, max(each.end for each in done))
    first = [each.first - each.at for each in came]
    per_token = [(each.end - each.first) / max(1, each.new - 1) for each in came]
    return {
        "tokens_per_second": sum(each.new for each in done if begin <= each.end < last + 1e-9)
        / (last - begin),
        "first_token_ms": {f"p{p}": 1e3 * percentile(first, p) for p in (50, 99)},
        "token_ms": {f"p{p}": 1e3 * percentile(per_token, p) for p in (50, 99)},
        "mean_answer_s": fmean(each.end - each.at for each in came),
    }


def measured_costs() -> Costs:
    """Of a Llama-3.1-8B with its EAGLE-3 draft and the controller on an H200."""
    rows = json.loads(MEASURED.read_text())["figures"]
    rates = {row["batch"]: row["policies"]["adaptive"]["while_stepping"] for row in rows}
    return Costs([(batch, batch / rate) for batch, rate in sorted(rates.items())], PROMPT, LAUNCH)


def arrivals(rate: float, seconds: float, prefixes: int, rng: random.Random) -> Iterator[Request]:
    """ShareGPT's lengths at random times. Half of the requests begin with one of the prefixes, as long as the rest of
    a prompt, the n-th in proportion to 1 / n."""
    weights = list(accumulate(1 / (n + 1) for n in range(prefixes)))
    names, at = [str(n) for n in range(prefixes)], 0.0
    for number in count():
        at += rng.expovariate(rate)
        if at > seconds:
            return
        own, new = (
            max(4, min(2048, int(mean * rng.lognormvariate(-s * s / 2, s))))
            for mean, s in zip(SIZES["sharegpt"], LOGNORMAL, strict=True)
        )
        shared = rng.random() < 0.5
        prefix = rng.choices(names, cum_weights=weights)[0] if shared else f"own {number}"
        yield Request(prefix, SIZES["sharegpt"][0] if shared else 0, own, new, at)


def main() -> int:
    """Simulate 1, 8, 100 and 1,000 GPUs, each a replica, under the same load each, behind the Ray Serve application's
    router, from the step costs that results/adaptive_h200.json has.

        python -m benchmarks.scaling

    Writes of each number: times to the first token and between tokens, and what choosing a replica costs.
    """
    args = options(main.__doc__).parse_args()
    costs, found = measured_costs(), list[Figures]()
    prompts = SIZES["sharegpt"][0] * 1.5 * costs.prompt
    rate = LOAD / (SIZES["sharegpt"][1] * costs.token[-1][1] / costs.most + prompts)
    for gpus in GPUS:
        end = WARM + min(60.0, max(2.0, COUNTED / gpus))
        begin = list(arrivals(gpus * rate, end, 50 * gpus, random.Random(0)))
        names = [f"replica {number}" for number in range(gpus)]
        route = by_cell(names)
        done = simulate(costs, names, begin, lambda _: None, route)
        started = time.perf_counter()
        for number in range(200):
            route(str(number), dict.fromkeys(names, 50))
        spent = (time.perf_counter() - started) / 200
        figures = {"gpus": gpus, "requests": len(begin), "routing_us": 1e6 * spent}
        found.append({**figures, **figures_of(done, WARM, end)})
    write_results("scaling", {"requests_per_second_a_gpu": rate, "fleets": found}, args.output)
    show({"rate": rate, "fleets": found})
    return 0


CLIENTS, EACH, PREFIXES, SHARED = 12, 3, 4, 128
BATCHES = (1, 4, 8, 12)
ROUNDS = 5  # of costs, a load, and costs: other programs may come and go


async def ask(url: str, prompt: list[int], new: int) -> Reply:
    """A greedy completion of exactly so many tokens. Raises ValueError for any other answer."""
    fields = {"model": "specserve-chat", "prompt": prompt, "max_tokens": new, "temperature": 0}
    connection = Connection(url)
    try:
        reply = await connection.send(
            request("/v1/completions", as_json({**fields, "ignore_eos": True, "stream": True}))
        )
    finally:
        connection.close()
    if reply.status != 200 or not reply.events():
        raise ValueError(f"{reply.status} {reply.body[:200].decode(errors='replace')}")
    return reply


async def calibrate(urls: Sequence[str], rng: random.Random) -> Costs:
    """Measure a replica's costs while the others do the same, because they share the machine's cores."""

    async def together(batch: int, prompt: int, new: int) -> list[Reply]:
        asked = (ask(url, ids(prompt, rng), new) for url in urls for _ in range(batch))
        return await asyncio.gather(*asked)

    token = []
    for batch in BATCHES:
        replies = await together(batch, 8, 48)
        token.append((batch, fmean((reply.last - reply.first) / 47 for reply in replies)))
    first = {
        size: fmean([fmean(reply.first for reply in await together(1, size, 2)) for _ in range(6)])
        for size in (8, 512)
    }
    prompt = (first[512] - first[8]) / (512 - 8)
    return Costs(token, prompt, first[8] - 8 * prompt)


def ids(size: int, rng: random.Random) -> list[int]:
    return [rng.randrange(300, 4000) for _ in range(size)]


def conversations(rng: random.Random) -> list[list[Request]]:
    """The requests of each client, one after the other."""

    def one() -> Request:
        return Request(str(rng.randrange(PREFIXES)), SHARED, rng.randrange(8, 128), rng.randrange(16, 96))

    return [[one() for _ in range(EACH)] for _ in range(CLIENTS)]


async def serve(urls: Sequence[str], clients: Sequence[Sequence[Request]], rng: random.Random) -> None:
    """Let clients send their requests to the servers that the router names, and note the times."""
    loads = dict.fromkeys(urls, 0)
    beginnings = {str(prefix): ids(SHARED, rng) for prefix in range(PREFIXES)}

    async def client(requests: Sequence[Request]) -> None:
        for each in requests:
            url = by_prefix(each.prefix, loads)
            loads[url] += 1
            each.at = time.perf_counter()
            reply = await ask(url, beginnings[each.prefix] + ids(each.own, rng), each.new)
            each.first, each.end = each.at + reply.first, each.at + reply.last
            loads[url] -= 1

    await asyncio.gather(*map(client, clients))


def expected(costs: Costs, urls: Sequence[str], clients: Sequence[Sequence[Request]]) -> list[Request]:
    """Simulate the same."""
    after = {id(one): two for requests in clients for one, two in pairwise(requests)}

    def follow(each: Request) -> Request | None:
        if (found := after.get(id(each))) is not None:
            found.at = each.end
        return found

    return simulate(costs, urls, [requests[0] for requests in clients], follow, by_prefix)


def replicas() -> int:
    """Hold the simulator against two servers of the bundled model on this machine's CPU: the costs of one are measured
    before and after each load of 12 clients, while the other does the same, and the load is simulated with them.

        python -m benchmarks.scaling replicas

    Ends with code 1 if tokens/s or the mean time of an answer, over all loads, are off by more than 15%.
    """
    args = options(replicas.__doc__).parse_args()
    rng = random.Random(0)
    servers = [Server(["-m", "specserve.launch", "--port", "0", "--cpu-threads", "1"]) for _ in range(2)]
    try:
        urls = [server.wait_ready().url for server in servers]
        asyncio.run(calibrate(urls, rng))
        before, rounds = asyncio.run(calibrate(urls, rng)), list[Figures]()
        for number in range(ROUNDS):
            clients = conversations(random.Random(number))
            asyncio.run(serve(urls, clients, rng))
            after = asyncio.run(calibrate(urls, rng))
            costs, before = mean_of(before, after), after
            again = expected(costs, urls, conversations(random.Random(number)))
            measured = figures_of([each for requests in clients for each in requests])
            rounds.append({"measured": measured, "simulated": figures_of(again), "costs": asdict(costs)})
    finally:
        for server in servers:
            server.stop()
    off = {
        name: sum(each["simulated"][name] for each in rounds) / sum(each["measured"][name] for each in rounds)
        - 1
        for name in ("tokens_per_second", "mean_answer_s")
    }
    figures = {"off": off, "rounds": rounds}
    write_results("scaling_replicas", figures, args.output)
    show(figures)
    return int(max(map(abs, off.values())) > 0.15)


def mean_of(one: Costs, other: Costs) -> Costs:
    token = [(batch, (a + b) / 2) for (batch, a), (_, b) in zip(one.token, other.token, strict=True)]
    return Costs(token, (one.prompt + other.prompt) / 2, (one.launch + other.launch) / 2)


if __name__ == "__main__":
    run_command(main, replicas)
