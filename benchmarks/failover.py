"""Two servers behind the shipped nginx configuration, two Ray replicas, or the ranks of a server, under load while one
of them is killed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.common import load_prompts
from benchmarks.http_client import Connection, Reply, as_json, closed_loop, request, send_once
from benchmarks.results import options, run_command, show, spread, write_results
from benchmarks.startup import empty_cache, served
from benchmarks.traffic import COMPLETIONS
from tests.front.processes import Server

SHIPPED = Path(__file__).parent.parent / "examples" / "docker"
BODY = {"model": "specserve-chat", "max_tokens": 96, "ignore_eos": True, "temperature": 0}
APPLICATION = "specserve"
ARGUMENTS = "--speculative-algorithm EAGLE3 --cpu-threads 1"
LOADING = 300  # seconds
ANSWERED_WITHIN = 120.0  # seconds
WHOLE_OK = "whole ok"
WHOLE_FAILED = "whole failed"
STREAM_COMPLETE = "stream complete"  # every choice has a finish reason, and [DONE] follows
STREAM_ERROR_EVENT = "stream ended by an error event"
STREAM_BROKEN = "stream ended by a broken connection"  # clients raise: the body's last chunk is missing
STREAM_REFUSED = "stream refused"  # its status was not 200, or there was no answer
STREAM_TRUNCATED = "stream silently truncated"  # looks whole and is not
OUTCOMES = (
    *(WHOLE_OK, WHOLE_FAILED, STREAM_COMPLETE, STREAM_ERROR_EVENT),
    *(STREAM_BROKEN, STREAM_REFUSED, STREAM_TRUNCATED),
)
LOST = (WHOLE_FAILED, STREAM_REFUSED, STREAM_TRUNCATED)
"""What must not be."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def write_configuration(directory: Path, listen: int, replicas: Sequence[int]) -> Path:
    """The shipped nginx.conf next to files that say other addresses: those of 127.0.0.1 with these ports."""
    shutil.copy(SHIPPED / "nginx.conf", directory)
    (directory / "listen.conf").write_text((SHIPPED / "listen.conf").read_text().replace("8080", str(listen)))
    lines = (SHIPPED / "replicas.conf").read_text().splitlines()
    servers = [line for line in lines if line.startswith("server ")]
    parameters = servers[0].split(maxsplit=2)[2]
    (directory / "replicas.conf").write_text(
        "".join(f"server 127.0.0.1:{port} {parameters}\n" for port in replicas)
    )
    return directory / "nginx.conf"


@contextlib.contextmanager
def nginx(directory: Path, replicas: Sequence[int]) -> Iterator[str]:
    """Run nginx in ``directory`` before the replicas' ports of 127.0.0.1. Gives its address; its log is
    ``directory / "log"``."""
    port = free_port()
    configuration = write_configuration(directory, port, replicas)
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(
            ["nginx", "-e", "stderr", "-p", f"{directory}/", "-c", str(configuration)], stdout=log, stderr=log
        )
        try:
            _wait(process, port, directory / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(500):
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"nginx does not listen: {log.read_text()}")


@dataclass
class Tally:
    """Counts of how requests ended. ``texts``: the answers of successful greedy requests, by prompt."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)  # seconds
    texts: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, outcome: str, seconds: float, reason: str = "") -> None:
        self.outcomes[outcome] += 1
        self.longest[outcome] = max(seconds, self.longest.get(outcome, 0.0))
        if reason:
            self.reasons[f"{outcome}: {reason}"] += 1

    def heard(self, prompt: str, text: str) -> None:
        self.texts.setdefault(prompt, Counter())[text] += 1

    @property
    def lost(self) -> int:
        return sum(self.outcomes[outcome] for outcome in LOST)

    def report(self) -> dict[str, Any]:
        return {
            "requests": self.outcomes.total(),
            **{outcome: self.outcomes[outcome] for outcome in OUTCOMES},
            "prompts": len(self.texts),
            "prompts with more than one text": sum(len(texts) > 1 for texts in self.texts.values()),
            "longest seconds": {outcome: round(seconds, 2) for outcome, seconds in self.longest.items()},
            "reasons": dict(self.reasons),
        }


class Load:
    """``clients`` request completions without pause, for streams half of the time, within the ``async with`` block;
    leaving it waits for the last answers."""

    def __init__(self, url: str, body: Mapping[str, Any], prompts: Sequence[str], clients: int = 8) -> None:
        self.tally = Tally()
        self.under_way: Counter[str] = Counter()  # "whole", and "stream" of which something has come
        self._url = url
        self._body = body
        self._prompts = prompts
        self._clients = clients
        self._stop = False

    async def __aenter__(self) -> Load:
        self._task = asyncio.create_task(closed_loop(self._url, self._clients, self._jobs, self._ask))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop = True
        await self._task

    async def until_busy(self) -> None:
        """Wait until every client has a request under way. Raises TimeoutError after a minute."""
        async with asyncio.timeout(60):
            while self.under_way.total() < self._clients:
                await asyncio.sleep(0.005)

    def _jobs(self, number: int) -> Iterator[str]:
        while not self._stop:
            yield self._prompts[number % len(self._prompts)]
            number += self._clients

    async def _ask(self, connection: Connection, prompt: str) -> None:
        begun = time.monotonic()
        ask = random.choice((self._stream, self._whole))  # so that each replica gets both
        outcome, reason = await ask(connection, prompt)
        self.tally.add(outcome, time.monotonic() - begun, reason)

    async def _whole(self, connection: Connection, prompt: str) -> tuple[str, str]:
        self.under_way["whole"] += 1
        try:
            async with asyncio.timeout(ANSWERED_WITHIN):
                reply = await connection.ask("/v1/completions", as_json({**self._body, "prompt": prompt}))
        except (OSError, EOFError) as error:
            return WHOLE_FAILED, repr(error)
        finally:
            self.under_way["whole"] -= 1
        if reply.status != 200:
            return WHOLE_FAILED, f"{reply.status} {reply.body[:200].decode()}"
        (choice,) = reply.json()["choices"]
        if choice["finish_reason"] is None:
            return WHOLE_FAILED, "no finish reason"
        self.tally.heard(prompt, choice["text"])
        return WHOLE_OK, ""

    async def _stream(self, connection: Connection, prompt: str) -> tuple[str, str]:
        streams = 0

        def begin(status: int) -> None:
            nonlocal streams
            streams = int(status == 200)
            self.under_way["stream"] += streams

        raw = request("/v1/completions", as_json({**self._body, "prompt": prompt, "stream": True}))
        try:
            async with asyncio.timeout(ANSWERED_WITHIN):
                reply = await connection.send(raw, begun=begin)
        except (OSError, EOFError) as error:
            return (STREAM_BROKEN if streams else STREAM_REFUSED), repr(error)
        finally:
            self.under_way["stream"] -= streams
        if reply.status != 200:
            return STREAM_REFUSED, f"{reply.status} {reply.body[:200].decode()}"
        return self._read(prompt, reply)

    def _read(self, prompt: str, reply: Reply) -> tuple[str, str]:
        text, finished, message = "", False, None
        lines = [line.removeprefix(b"data: ") for line in reply.body.split(b"\n") if line]
        ended = lines[-1:] == [b"[DONE]"]
        for event in map(json.loads, lines[: len(lines) - ended]):
            message = event["error"]["message"] if "error" in event else message
            for choice in event.get("choices", ()):
                text += choice["text"]
                finished |= choice["finish_reason"] is not None
        if message is not None:
            return STREAM_ERROR_EVENT, message
        if not (finished and ended):
            return STREAM_TRUNCATED, f"{len(text)} characters, {finished=}, {ended=}"
        self.tally.heard(prompt, text)
        return STREAM_COMPLETE, ""


@dataclass
class Story:
    """What is done to servers under load. ``seconds``: of load around each event."""

    load: Load
    seconds: float
    begun: float = field(default_factory=time.monotonic)
    events: list[dict[str, Any]] = field(default_factory=list)

    def note(self, event: str) -> None:
        at = round(time.monotonic() - self.begun, 1)
        self.events.append({"event": event, "at": at, "under way": dict(self.load.under_way)})

    async def pause(self, busy: bool = False) -> None:
        """Let the load run; until every client has a request under way if ``busy``."""
        await asyncio.sleep(self.seconds)
        if busy:
            await self.load.until_busy()


async def under_load(
    url: str, clients: int, seconds: float, happen: Callable[[Story], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """The figures of a load during which ``happen`` does something to its servers."""
    texts = [row.get("prompt") or row["messages"][0]["content"] for row in load_prompts()]
    async with Load(url, BODY, texts, clients) as load:
        story = Story(load, seconds)
        outcome = await happen(story)
    return {
        "clients": clients,
        "seconds": round(time.monotonic() - story.begun, 1),
        "events": story.events,
        **outcome,
        **load.tally.report(),
        "lost": load.tally.lost,
    }


def start(port: int) -> Server:
    return Server(["-m", "specserve.launch", "--port", str(port), "--speculative-algorithm", "EAGLE3"])


@contextlib.contextmanager
def two_servers() -> Iterator[dict[int, Server]]:
    """By their ports; those that are in the dictionary at the end are stopped."""
    servers = {port: start(port) for port in (free_port(), free_port())}
    try:
        yield servers
    finally:
        for server in servers.values():
            server.process.terminate()
        for server in servers.values():
            server.process.wait(90)


async def kill_and_drain(story: Story, servers: dict[int, Server]) -> dict[str, Any]:
    """kill -9 of the first server, its restart, and SIGTERM to the second."""
    first, second = servers
    await story.pause(busy=True)
    story.note("kill -9 of the first")
    servers[first].process.kill()
    await asyncio.to_thread(servers[first].process.wait, 180)
    await story.pause()
    story.note("the first is started again")
    servers[first] = start(first)
    await asyncio.to_thread(servers[first].wait_ready)
    story.note("the first is ready")
    await story.pause(busy=True)
    story.note("SIGTERM to the second")
    servers[second].process.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(servers[second].process.wait, 180)
    story.note("the second has ended")
    await story.pause()
    return {"exit code after SIGTERM": code}


def main() -> int:
    """Two servers behind the shipped nginx configuration, under load: kill -9 one, restart it, SIGTERM the other.

        python -m benchmarks.failover

    Clients ask for greedy completions of the bundled model without pause, for streams half of the time. Ends with code
    1 when a request that is not streamed failed, or a stream looked whole and was not.
    """
    args = options_of(main.__doc__)
    with tempfile.TemporaryDirectory() as directory, two_servers() as servers:
        for server in servers.values():
            server.wait_ready()
        with nginx(Path(directory), list(servers)) as url:
            figures = asyncio.run(
                under_load(url, args.clients, args.seconds, lambda story: kill_and_drain(story, servers))
            )
    return finish("failover", figures, args.output)


def finish(name: str, figures: dict[str, Any], output: Path | None) -> int:
    """Write and print the figures, and return the exit code."""
    write_results(name, figures, output)
    show(figures)
    return int(figures["lost"] > 0 or figures.get("exit code after SIGTERM", 0) != 0)


def options_of(description: str | None) -> argparse.Namespace:
    parser = options(description)
    parser.add_argument("--clients", type=int, default=12, help="each asks for a stream half of the time")
    parser.add_argument("--seconds", type=float, default=20, help="of load around each event")
    return parser.parse_args()


def replica_pids() -> dict[str, int]:
    """The processes of running replicas, by their actors' names."""
    import ray
    from ray.util import list_named_actors

    pids = {}
    for actor in list_named_actors(all_namespaces=True):
        if actor["name"].startswith(f"SERVE_REPLICA::{APPLICATION}#Replica#"):
            handle = ray.get_actor(actor["name"], actor["namespace"])
            pids[actor["name"]] = ray.get(handle.__ray_call__.remote(lambda _: os.getpid()))
    return pids


def servers_of(pid: int) -> set[int]:
    """The processes that a replica has begun, and those that they have begun."""
    children = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        children |= {int(child) for child in (thread / "children").read_text().split()}
    return children.union(*map(servers_of, children))


def two_run() -> bool:
    from ray import serve

    deployments = serve.status().applications[APPLICATION].deployments
    return bool(deployments["Replica"].replica_states.get("RUNNING") == 2)


async def until(done: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(done):
            await asyncio.sleep(0.2)


async def kill_and_upgrade(story: Story, upgrade: Callable[[], object]) -> dict[str, Any]:
    """kill -9 of a replica, until Ray has begun another; then others in place of both."""
    await story.pause(busy=True)
    victim = next(iter((await asyncio.to_thread(replica_pids)).values()))
    servers = servers_of(victim)
    assert servers
    os.kill(victim, signal.SIGKILL)
    story.note("kill -9 of a replica")
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers), 30)
    story.note("its server has ended")
    await until(lambda: not two_run(), 60)
    await until(two_run, LOADING)
    story.note("another replica runs")
    await story.pause(busy=True)
    before = await asyncio.to_thread(replica_pids)
    story.note("upgrade of both")
    await asyncio.to_thread(upgrade)
    await until(lambda: two_run() and not before.keys() & replica_pids().keys(), LOADING)
    story.note("both are upgraded")
    await story.pause()
    return {}


def replicas() -> int:
    """The Ray Serve application with two replicas on this machine, under load: kill -9 one of them, upgrade both.

        python -m benchmarks.failover replicas

    Needs `pip install "ray[serve]"`. Load and exit code are those of `python -m benchmarks.failover`.
    """
    args = options_of(replicas.__doc__)
    import ray
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    from examples.ray_serve.app import Options, build

    port = free_port()
    ray.init(num_cpus=8, include_dashboard=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})

        def deploy(version: str) -> None:
            options = Options(replicas=2, gpus=0, cpus=1, arguments=f"{ARGUMENTS} --random-seed {version}")
            serve.run(build(options), name=APPLICATION, route_prefix="/")

        deploy("1")
        assert serve.status().applications[APPLICATION].status == ApplicationStatus.RUNNING
        url = f"http://127.0.0.1:{port}"
        figures = asyncio.run(
            under_load(
                url, args.clients, args.seconds, lambda story: kill_and_upgrade(story, lambda: deploy("2"))
            )
        )
    finally:
        serve.shutdown()
        ray.shutdown()
    return finish("ray_failover", {"ray": ray.__version__, **figures}, args.output)


async def told_and_answered(url: str, clients: int, tokens: int, rank: int) -> dict[str, Any]:
    """Seconds after a process is killed: until each client's stream has ended, and until a new request is answered."""
    begun, ends, killed = Counter[int](), list[float](), 0.0

    def body(new: int, stream: bool) -> bytes:
        prompt = [random.randrange(10, 2000) for _ in range(64)]
        asked = {"model": "model", "prompt": prompt, "max_tokens": new, "ignore_eos": True, "stream": stream}
        return request(COMPLETIONS, as_json(asked))

    async def stream() -> str:
        try:
            reply = await Connection(url).send(
                body(tokens, True), begun=lambda status: begun.update([status])
            )
        except (OSError, EOFError):
            outcome = STREAM_BROKEN
        else:
            outcome = STREAM_ERROR_EVENT if b'"error"' in reply.body else STREAM_COMPLETE
        ends.append(time.monotonic())
        return outcome

    streams = [asyncio.create_task(stream()) for _ in range(clients)]
    async with asyncio.timeout(60):
        while begun.total() < clients:
            await asyncio.sleep(0.01)
    assert begun[200] == clients, dict(begun)
    await asyncio.sleep(1)
    assert not ends, "raise --tokens: a stream ended before the kill"
    os.kill(rank, signal.SIGKILL)
    killed = time.monotonic()
    outcomes = Counter(await asyncio.gather(*streams))
    async with asyncio.timeout(LOADING):
        while True:
            with contextlib.suppress(OSError, EOFError):
                if (await send_once(url, body(1, False))).status == 200:
                    break
            await asyncio.sleep(0.05)
    answered = time.monotonic() - killed
    told = spread([end - killed for end in ends])
    return {"clients": clients, **outcomes, "told seconds": told, "answered seconds": answered}


def rank() -> int:
    """A server of several ranks: seconds of its start without kernels and with them, and what clients see of a kill -9.

        python -m benchmarks.failover rank --model DIR/target [--load-format dummy] [--tensor-parallel-size 2] [--cold]

    ``--clients`` streams run when the last rank is killed. The figures say after how many seconds each client knew, and
    a new request was answered. Ends with code 1 when a stream looked whole.
    """
    parser = options(rank.__doc__)
    parser.add_argument("--model", required=True, help="directory of the target")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4000, help="of each stream")
    parser.add_argument("--cold", action="store_true", help="start it without kernels, too")
    args = parser.parse_args()
    settings = {
        "model_path": args.model,
        "load_format": args.load_format,
        "device": args.device,
        "tensor_parallel_size": args.tensor_parallel_size,
        "max_running_requests": args.clients,
        "skip_tokenizer_init": True,
    }
    figures: dict[str, Any] = {}
    with empty_cache() if args.cold else contextlib.nullcontext():
        if args.cold:
            with served(settings) as (_, figures["cold seconds"]):
                pass
        with served(settings) as (server, figures["warm seconds"]):
            last = json.loads(server.get("/server_info")[1])["engine"]["ranks"][-1]
            figures |= asyncio.run(told_and_answered(server.url, args.clients, args.tokens, last["pid"]))
    write_results("rank_failover", figures, args.output)
    show(figures)
    return int(figures.get(STREAM_COMPLETE, 0) > 0)


if __name__ == "__main__":
    run_command(main, replicas, rank)
