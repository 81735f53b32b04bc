"""Two servers behind the shipped nginx configuration, under load: kill -9 one, restart it, SIGTERM the other.

    python -m benchmarks.failover

Clients ask for greedy completions of the bundled model without pause, for streams half of the time. Ends with code 1
when a request that is not streamed failed, or a stream looked whole and was not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.balancer import free_port, nginx
from benchmarks.common import load_prompts, write_results
from benchmarks.failover_load import Load

BODY = {"model": "specserve-chat", "max_tokens": 96, "ignore_eos": True, "temperature": 0}


def load_texts() -> list[str]:
    """Prompts of completions: the held-out ones, questions as they are."""
    return [row.get("prompt") or row["messages"][0]["content"] for row in load_prompts()]


class Server:
    """``python -m specserve.launch`` on a port of 127.0.0.1."""

    def __init__(self, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "specserve.launch", "--port", str(port)]
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*command, "--speculative-algorithm", "EAGLE3"], stdout=errors, stderr=errors
            )

    async def ready(self) -> Server:
        async with asyncio.timeout(180), httpx.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/health")).status_code == 200:
                        return self
                assert self.process.poll() is None, "the server has ended"
                await asyncio.sleep(0.1)

    async def ended(self) -> int:
        """Return the exit code."""
        return await asyncio.to_thread(self.process.wait, 180)


@contextlib.contextmanager
def two_servers(logs: Path) -> Iterator[dict[int, Server]]:
    """By their ports; those that are in the dictionary at the end are stopped."""
    servers = {port: Server(port, logs / f"{port}.log") for port in (free_port(), free_port())}
    try:
        yield servers
    finally:
        for server in servers.values():
            server.process.terminate()
        for server in servers.values():
            server.process.wait(90)


async def run(clients: int, seconds: float, directory: Path) -> dict[str, Any]:
    """``seconds``: of load before, between and after the three events."""
    with two_servers(directory) as servers:
        first, second = servers
        await asyncio.gather(*(server.ready() for server in servers.values()))
        with nginx(directory, [first, second]) as url:
            async with Load(url, BODY, load_texts(), clients) as load:
                begun = time.monotonic()
                events: list[dict[str, Any]] = []

                def note(event: str) -> None:
                    events.append(
                        {
                            "event": event,
                            "at": round(time.monotonic() - begun, 1),
                            "under way": dict(load.under_way),
                        }
                    )

                await asyncio.sleep(seconds)
                await load.until_busy()
                note("kill -9 of the first")
                servers[first].process.kill()
                await servers[first].ended()
                await asyncio.sleep(seconds)
                note("the first is started again")
                servers[first] = Server(first, directory / f"{first}.log")
                await servers[first].ready()
                note("the first is ready")
                await asyncio.sleep(seconds)
                await load.until_busy()
                note("SIGTERM to the second")
                servers[second].process.send_signal(signal.SIGTERM)
                code = await servers[second].ended()
                note("the second has ended")
                await asyncio.sleep(seconds)
            return {
                "clients": clients,
                "seconds": round(time.monotonic() - begun, 1),
                "events": events,
                "exit code after SIGTERM": code,
                **load.tally.report(),
                "lost": load.tally.lost,
            }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=12, help="each asks for a stream half of the time")
    parser.add_argument("--seconds", type=float, default=20, help="of load around each event")
    parser.add_argument("--output", type=Path, help="not set: benchmarks/results/failover.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = asyncio.run(run(args.clients, args.seconds, Path(directory)))
    write_results("failover", figures, args.output)
    for name, value in figures.items():
        print(f"{name}: {value}")
    return int(figures["lost"] > 0 or figures["exit code after SIGTERM"] != 0)


if __name__ == "__main__":
    sys.exit(main())
