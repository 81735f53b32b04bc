"""The Ray Serve application with two replicas on this machine, under load: kill -9 one of them.

    python -m benchmarks.ray_failover

Needs `pip install "ray[serve]"`. Load and exit code are those of `python -m benchmarks.failover`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus
from ray.util import list_named_actors

from benchmarks.balancer import free_port
from benchmarks.common import write_results
from benchmarks.failover import BODY, load_texts
from benchmarks.failover_load import Load
from examples.ray_serve.app import Options, build

APPLICATION = "specserve"
ARGUMENTS = "--speculative-algorithm EAGLE3 --cpu-threads 1"
LOADING = 300  # seconds


def replica_pids() -> dict[str, int]:
    """The processes of running replicas, by their actors' names."""
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
    deployments = serve.status().applications[APPLICATION].deployments
    return deployments["Replica"].replica_states.get("RUNNING") == 2


async def until(done: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(done):
            await asyncio.sleep(0.2)


async def run(url: str, clients: int, seconds: float) -> dict[str, Any]:
    async with Load(url, BODY, load_texts(), clients) as load:
        begun = time.monotonic()
        events: list[dict[str, Any]] = []

        def note(event: str) -> None:
            at = round(time.monotonic() - begun, 1)
            events.append({"event": event, "at": at, "under way": dict(load.under_way)})

        await asyncio.sleep(seconds)
        await load.until_busy()
        victim = next(iter((await asyncio.to_thread(replica_pids)).values()))
        servers = servers_of(victim)
        assert servers
        os.kill(victim, signal.SIGKILL)
        note("kill -9 of a replica")
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers), 30)
        note("its server has ended")
        await until(lambda: not two_run(), 60)
        await until(two_run, LOADING)
        note("another replica runs")
        await asyncio.sleep(seconds)
    return {
        "clients": clients,
        "seconds": round(time.monotonic() - begun, 1),
        "events": events,
        **load.tally.report(),
        "lost": load.tally.lost,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=12, help="half of them ask for streams")
    parser.add_argument("--seconds", type=float, default=20, help="of load before and after")
    parser.add_argument("--output", type=Path, help="not set: benchmarks/results/ray_failover.json")
    args = parser.parse_args()
    port = free_port()
    ray.init(num_cpus=8, include_dashboard=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(
            build(Options(replicas=2, gpus=0, cpus=1, arguments=ARGUMENTS)),
            name=APPLICATION,
            route_prefix="/",
        )
        assert serve.status().applications[APPLICATION].status == ApplicationStatus.RUNNING
        figures = asyncio.run(run(f"http://127.0.0.1:{port}", args.clients, args.seconds))
    finally:
        serve.shutdown()
        ray.shutdown()
    write_results("ray_failover", {"ray": ray.__version__, **figures}, args.output)
    for name, value in figures.items():
        print(f"{name}: {value}")
    return int(figures["lost"] > 0)


if __name__ == "__main__":
    sys.exit(main())
