"""The part of Ray Serve that ``examples/ray_serve`` uses, in one process, for machines without Ray.

Names, arguments and errors are Ray 2.60's; ``tests/test_ray_serve.py`` compares them with Ray's where Ray is installed.
Whatever crosses processes in Ray is pickled here too. Health is checked only by ``check_health``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import uvicorn
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request


class RayError(Exception):
    pass


class RayTaskError(RayError):
    """An exception of a replica, as its caller gets it."""


class RayServeException(Exception):
    pass


class BackPressureError(RayServeException):
    def __init__(self, num_queued_requests: int, max_queued_requests: int) -> None:
        super().__init__(num_queued_requests, max_queued_requests)


class DeploymentUnavailableError(RayServeException):
    def __init__(self, deployment_id: object) -> None:
        super().__init__(deployment_id)


@dataclass(frozen=True)
class ReplicaID:
    unique_id: str


@dataclass(eq=False)
class RunningReplica:
    """A replica; ``callable`` is the user's object, ``ongoing`` the number of its requests."""

    replica_id: ReplicaID
    callable: Any
    ongoing: int = 0


@dataclass
class RequestRoutingContext:
    should_backoff: bool = False


@dataclass
class PendingRequest:
    args: list[Any]
    kwargs: dict[Any, Any]
    metadata: Any
    routing_context: RequestRoutingContext = field(default_factory=RequestRoutingContext)


class QueueLengths:
    def __init__(self, running: list[RunningReplica]) -> None:
        self._running = running

    def get(self, replica_id: ReplicaID) -> int | None:
        return next((each.ongoing for each in self._running if each.replica_id == replica_id), None)


class RequestRouter(ABC):
    replica_queue_len_cache: QueueLengths

    @abstractmethod
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]: ...


class RequestRouterConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    request_router_class: Callable[..., Any]


class AutoscalingPolicy(BaseModel):
    model_config = ConfigDict(extra="forbid")

    policy_function: Callable[..., Any]
    policy_kwargs: dict[str, Any]


class AutoscalingConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    min_replicas: int
    max_replicas: int
    policy: AutoscalingPolicy


class Deployment:
    """A class to be run ``num_replicas`` times."""

    def __init__(
        self,
        callable: type,
        num_replicas: int,
        max_ongoing_requests: int,
        request_router_config: RequestRouterConfig | None,
    ) -> None:
        self.callable, self.num_replicas = callable, num_replicas
        self.max_ongoing_requests, self.request_router_config = max_ongoing_requests, request_router_config

    def bind(self, *args: Any, **kwargs: Any) -> Application:
        return Application(self, args, kwargs)


@dataclass
class Application:
    deployment: Deployment
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def deployment(
    _func_or_class: type,
    *,
    num_replicas: int | None = None,
    autoscaling_config: AutoscalingConfig | None = None,
    ray_actor_options: dict[str, Any],
    placement_group_bundles: list[dict[str, float]] | None = None,
    placement_group_strategy: str | None = None,
    max_ongoing_requests: int,
    graceful_shutdown_timeout_s: float,
    request_router_config: RequestRouterConfig | None = None,
    health_check_period_s: float = 10,
) -> Deployment:
    assert set(ray_actor_options) <= {"num_cpus", "num_gpus"}
    if placement_group_bundles is not None:
        assert placement_group_strategy == "STRICT_PACK"
        (bundle,) = placement_group_bundles
        assert bundle.get("GPU", 0) == ray_actor_options["num_gpus"]
        assert bundle["CPU"] == ray_actor_options["num_cpus"]
    assert (num_replicas is None) != (autoscaling_config is None)
    number = num_replicas or autoscaling_config.min_replicas
    return Deployment(_func_or_class, number, max_ongoing_requests, request_router_config)


_CONTEXT: ContextVar[RunningReplica] = ContextVar("replica")


def get_replica_context() -> RunningReplica:
    return _CONTEXT.get()


class Deployed:
    """The replicas of a bound deployment."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self._numbers = itertools.count()
        # Its threads stay, as Ray's do: what they began ends with them (setpriv --pdeathsig).
        self._pool = ThreadPoolExecutor()
        made = [self._pool.submit(self._make) for _ in range(application.deployment.num_replicas)]
        self.running = [each.result() for each in made]
        self._gone: list[RunningReplica] = []
        config = application.deployment.request_router_config
        self._router = config.request_router_class() if config is not None else _First()
        self._router.replica_queue_len_cache = QueueLengths(self.running)

    def _make(self) -> RunningReplica:
        args, kwargs = self.application.args, self.application.kwargs
        made = self.application.deployment.callable(*args, **kwargs)
        return RunningReplica(ReplicaID(f"replica{next(self._numbers)}"), made)

    def check_health(self) -> None:
        """Replace those that fail."""
        for replica in list(self.running):
            try:
                replica.callable.check_health()
            except Exception:
                self.running.remove(replica)
                self._gone.append(replica)
                self.running.append(self._pool.submit(self._make).result())

    async def close_sessions(self) -> None:
        """Of HTTP, on their loop: those of Ray's replicas end with their processes."""
        for replica in (*self.running, *self._gone):
            if (session := getattr(replica.callable, "_session", None)) is not None:
                await session.close()

    def close(self) -> None:
        """Serve, too, calls ``__del__`` itself."""
        for replica in self.running:
            with contextlib.suppress(AttributeError):
                replica.callable.__del__()
        self._pool.shutdown()

    async def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunningReplica:
        """The first with room in the router's order, as soon as there is one."""
        while True:
            pending = PendingRequest(list(args), kwargs, None)
            ranks = await self._router.choose_replicas(list(self.running), pending)
            for replica in itertools.chain.from_iterable(ranks):
                if replica.ongoing < self.application.deployment.max_ongoing_requests:
                    return replica
            assert pending.routing_context.should_backoff, "Serve would ask without a pause"
            await asyncio.sleep(0.02)

    async def stream(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncIterator[Any]:
        replica = await self.choose(args, kwargs)
        replica.ongoing += 1
        try:
            pieces = getattr(replica.callable, method)(*_sent(args), **_sent(kwargs))
            async with contextlib.aclosing(pieces):
                while True:
                    _CONTEXT.set(replica)
                    try:
                        piece = await anext(pieces)
                    except StopAsyncIteration:
                        return
                    except Exception as error:
                        raise RayTaskError(repr(error)) from error
                    yield _sent(piece)
        finally:
            replica.ongoing -= 1


def _sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class _First(RequestRouter):
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]


class DeploymentResponseGenerator:
    def __init__(self, pieces: AsyncIterator[Any]) -> None:
        self._pieces: Any = pieces

    def __aiter__(self) -> DeploymentResponseGenerator:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._pieces)

    def cancel(self) -> None:
        self._closing = asyncio.ensure_future(self._pieces.aclose())


class DeploymentHandle:
    def __init__(self, deployed: Deployed, method_name: str = "__call__") -> None:
        self._deployed, self._method_name = deployed, method_name

    def options(self, *, method_name: str, stream: bool) -> DeploymentHandle:
        assert stream, "all that this can"
        return DeploymentHandle(self._deployed, method_name)

    def remote(self, *args: Any, **kwargs: Any) -> DeploymentResponseGenerator:
        return DeploymentResponseGenerator(self._deployed.stream(self._method_name, args, kwargs))


class Serve:
    """One application, whose last deployment answers HTTP."""

    def __init__(self) -> None:
        self.deployed: list[Deployed] = []
        self._http: dict[str, Any] = {}
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread()

    def start(self, *, http_options: dict[str, Any]) -> None:
        self._http = http_options

    def run(self, target: Application, *, name: str, route_prefix: str) -> DeploymentHandle:
        ingress = self._deploy(target)

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            replica = await ingress.choose((), {})
            response = await replica.callable(Request(scope, receive))
            await response(scope, receive, send)

        config = uvicorn.Config(answer, log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)
        listener = socket.create_server((self._http["host"], self._http["port"]))
        server = self._server

        async def serve() -> None:
            await server.serve([listener])
            for deployed in self.deployed:
                await deployed.close_sessions()

        self._thread = threading.Thread(target=asyncio.run, args=(serve(),))
        self._thread.start()
        while not server.started:
            time.sleep(0.01)
        return DeploymentHandle(ingress)

    def _deploy(self, application: Application) -> Deployed:
        args = tuple(
            DeploymentHandle(self._deploy(arg)) if isinstance(arg, Application) else arg
            for arg in application.args
        )
        found = Deployed(Application(application.deployment, args, application.kwargs))
        self.deployed.append(found)
        return found

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join()
        for deployed in self.deployed:
            deployed.close()
        self.deployed.clear()


SERVE = Serve()
MODULES: dict[str, dict[str, Any]] = {
    "ray": {"init": lambda *, num_cpus, include_dashboard: None, "shutdown": lambda: None},
    "ray.exceptions": {"RayError": RayError},
    "ray.serve": {
        "Application": Application,
        "deployment": deployment,
        "get_replica_context": get_replica_context,
        "run": SERVE.run,
        "shutdown": SERVE.shutdown,
        "start": SERVE.start,
    },
    "ray.serve.config": {
        each.__name__: each for each in (AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig)
    },
    "ray.serve.exceptions": {
        each.__name__: each for each in (RayServeException, BackPressureError, DeploymentUnavailableError)
    },
    "ray.serve.handle": {"DeploymentHandle": DeploymentHandle},
    "ray.serve.request_router": {
        each.__name__: each for each in (PendingRequest, RequestRouter, RunningReplica)
    },
}


def install() -> None:
    """Make ``import ray`` find this."""
    for name, members in MODULES.items():
        module = ModuleType(name)
        vars(module).update(members, __path__=[])
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
