"""The Ray Serve application: routing, and two replicas. They run the bundled model if Ray is installed, otherwise a
fake engine on ``tests/fake_ray.py``."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from benchmarks.failover import STREAM_COMPLETE, WHOLE_OK, Load, free_port
from examples.ray_serve.prefix import PREFIX, SLACK, prefix_of, rank
from examples.ray_serve.scaling import FIRST_TOKEN, Scaling, wanted
from tests import fake_ray
from tests.front import processes
from tests.front.fakes import byte_tokenizer

ARGUMENTS = "--cpu-threads 1 --served-model-name tiny --log-level warning"
MOST = 2**16  # bytes of a body
NAMES = [f"replica-{index}" for index in range(5)]


def chat(*messages: tuple[str, str], **fields: Any) -> bytes:
    return json.dumps(
        {"messages": [{"role": role, "content": text} for role, text in messages], **fields}
    ).encode()


class TestPrefix:
    def test_a_conversation_keeps_its_prefix(self) -> None:
        first = [("system", "Be brief."), ("user", "Hello?")]
        begun = prefix_of(chat(*first))
        assert begun == prefix_of(chat(*first, ("assistant", "Hi."), ("user", "More!")))
        assert begun == prefix_of(chat(*first, temperature=0))
        assert begun != prefix_of(chat(first[0], ("user", "Bye?")))
        assert begun != prefix_of(chat(*first, prompt_cache_key="mine"))

    def test_only_the_beginning_counts(self) -> None:
        prompts = ["a" * PREFIX, "a" * PREFIX + "b", "b" * PREFIX]
        a, longer, b = (prefix_of(json.dumps({"prompt": prompt}).encode()) for prompt in prompts)
        assert a == longer != b
        assert prefix_of(b'{"prompt": [1, 2]}') != prefix_of(b'{"prompt": [1, 3]}')

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"\xff",
            b"[]",
            b"{}",
            b'{"messages": 5}',
            b'{"messages": [5]}',
            b'{"prompt": "\\ud800"}',
            b"[" * 100_000,
        ],
    )
    def test_bad_bodies_go_somewhere(self, body: bytes) -> None:
        assert rank(prefix_of(body), {"a": 0}) == ["a"]


class TestRank:
    def test_prefixes_spread_and_stay(self) -> None:
        idle = dict.fromkeys(NAMES, 0)
        homes = {prefix: rank(prefix, idle)[0] for prefix in map(str, range(1000))}
        assert min(Counter(homes.values()).values()) > 140
        gone = homes["0"]
        left = {name: 0 for name in NAMES if name != gone}
        for prefix, home in homes.items():
            assert home == gone or rank(prefix, left)[0] == home
        busy = {**idle, homes["0"]: SLACK}
        assert rank("0", busy) == rank("0", idle)

    def test_too_much_to_do(self) -> None:
        order = rank("x", dict.fromkeys(NAMES, 0))
        loads = {**dict.fromkeys(NAMES, 0), order[0]: 50, order[2]: 40}
        assert rank("x", loads) == [order[1], order[3], order[4], order[2], order[0]]
        even = dict.fromkeys(NAMES, 50)
        assert rank("x", even) == order

    def test_avoided_come_last(self) -> None:
        order = rank("x", dict.fromkeys(NAMES, 0))
        assert rank("x", dict.fromkeys(NAMES, 0), avoid={order[0], "gone"}) == [*order[1:], order[0]]


class TestScaling:
    @pytest.mark.parametrize(
        ("replicas", "requests", "late", "expected"),
        [
            (2, 64, 0, 2),
            (2, 65, 0, 3),
            (4, 10, 0, 1),
            (4, 10, 0.7, 4),
            (4, 10, 1.3, 6),
            (4, 10, 9, 8),
            (4, 300, 1.3, 10),
        ],
    )
    def test_requests_and_late_tokens(
        self, replicas: int, requests: float, late: float, expected: int
    ) -> None:
        assert wanted(replicas, requests, 32, late) == expected

    def test_the_latest_replica_decides(self) -> None:
        context = SimpleNamespace(current_num_replicas=2, total_num_requests=10.0, aggregated_metrics={})
        policy = Scaling(requests=32, first_token_seconds=2)
        assert policy(context)[0] == 1
        context.aggregated_metrics = {FIRST_TOKEN: {"a": 0.1, "b": 3.0}}
        assert policy(context)[0] == 3


NEVER_MADE = {
    "Application",
    "DeploymentHandle",
    "RayError",
    "RayServeException",
    "RequestRouter",
    "RunningReplica",
}
HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """Ray, or what stands for it."""
    if HAS_RAY:
        yield
        return
    before = set(sys.modules)
    fake_ray.install()
    yield
    fakes = ("ray", "examples.ray_serve.")
    for name in set(sys.modules) - before:
        if name.startswith(fakes):
            del sys.modules[name]


def assert_takes(real: Any, fake: Any) -> None:
    known = inspect.signature(real).parameters
    free = any(each.kind is each.VAR_KEYWORD for each in known.values())
    assert free or set(inspect.signature(fake).parameters) <= set(known), fake


@pytest.mark.skipif(not HAS_RAY, reason="compares the fake with Ray, which is not installed")
class TestFake:
    def test_ray_has_what_the_fake_has(self) -> None:
        """And takes its arguments."""
        for module, members in fake_ray.MODULES.items():
            for name, fake in members.items():
                real = getattr(importlib.import_module(module), name)
                if name not in NEVER_MADE:
                    assert_takes(real, fake)
        from ray.serve.handle import DeploymentHandle
        from ray.serve.request_router import RequestRouter

        assert_takes(DeploymentHandle.options, fake_ray.DeploymentHandle.options)
        assert_takes(RequestRouter.choose_replicas, fake_ray.RequestRouter.choose_replicas)

    def test_errors_are_related_alike(self) -> None:
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

        assert issubclass(RayTaskError, RayError)
        assert issubclass(BackPressureError, RayServeException)
        assert issubclass(DeploymentUnavailableError, RayServeException)
        assert not issubclass(RayServeException, RayError)


@pytest.mark.usefixtures("ray")
@pytest.mark.filterwarnings("ignore")
class TestWithoutReplicas:
    def test_serve_finds_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Serve's errors are no RayErrors; they, too, are tried again and have OpenAI's shape."""
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

        from examples.ray_serve import ingress

        raised = iter([BackPressureError(1, 1), *[DeploymentUnavailableError("r")] * ingress.ATTEMPTS])
        asked = []

        class Handle:
            def options(self, **_: Any) -> Handle:
                return self

            async def remote(self, call: Any) -> AsyncIterator[Any]:
                asked.append(call)
                raise next(raised)
                yield

        async def sleep(_: float) -> None:
            pass

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}"}

        monkeypatch.setattr(ingress.asyncio, "sleep", sleep)
        scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "headers": []}
        found = asyncio.run(ingress.Ingress(Handle(), 2)(Request(scope, receive)))  # type: ignore[arg-type]
        assert len(asked) == ingress.ATTEMPTS
        assert (found.status_code, found.headers["retry-after"]) == (503, "5")
        error = json.loads(bytes(found.body))["error"]
        assert (error["code"], error["message"]) == (
            "not_ready",
            "no replica took the request: DeploymentUnavailableError",
        )

    def test_options(self) -> None:
        from examples.ray_serve.app import Options, build

        replica = build(Options(gpus=4, arguments="--tp 2", replicas=3, most_replicas=9)).args[0]
        assert isinstance(replica, fake_ray.Application) or HAS_RAY
        assert replica.args[0][:4] == ["--tensor-parallel-size", "4", "--tp", "2"]
        for bad, words in (
            ({"gpus": 1.5}, "gpus above 1 must be a whole number, found 1.5"),
            ({"most_replicas": 1}, "most_replicas must be at least 2, found 1"),
        ):
            with pytest.raises(ValueError, match=words):
                Options(**bad)

    def test_a_server_that_never_gets_ready(self) -> None:
        from examples.ray_serve.replica import Replica

        with pytest.raises(RuntimeError, match=r"not ready within 0.2 seconds"):
            Replica([], loading_seconds=0.2)
        with pytest.raises(RuntimeError, match="ended with code 2"):
            Replica(["--odd"], loading_seconds=60)


@pytest.fixture(scope="module")
def fake_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Without Ray, replicas begin servers of a slow fake engine."""
    if HAS_RAY:
        yield
        return
    from examples.ray_serve.replica import subprocess

    model = tmp_path_factory.mktemp("models") / "tiny"
    byte_tokenizer().save_pretrained(model)
    begin = subprocess.Popen
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def begin_fake(command: list[str]) -> Any:
        at = command.index("specserve.launch")
        fake = [*command[: at - 1], "-c", processes.RUN, "build_slow", "--model-path", str(model)]
        return begin([*fake, *command[at + 1 :]], cwd=processes.ROOT, env=environ)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", begin_fake)
        yield


def kill_a_server() -> None:
    """Its replica lives on until Serve looks after its health."""
    if HAS_RAY:
        from benchmarks.failover import replica_pids, servers_of

        pids = servers_of(next(iter(replica_pids().values())))
    else:
        # private: the example's server, which only Serve's own health check ends
        pids = {fake_ray.SERVE.deployed[0].running[0].callable._server.pid}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("ray", "fake_servers")
@pytest.mark.filterwarnings("ignore")
class TestApplication:
    @pytest.fixture(scope="class")
    def url(self, ray: None, fake_servers: None) -> Iterator[str]:
        import ray as api
        from ray import serve

        from examples.ray_serve.app import Options, build

        port = free_port()
        api.init(num_cpus=8, include_dashboard=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            options = Options(gpus=0, most_replicas=2, arguments=ARGUMENTS, max_body_bytes=MOST)
            serve.run(build(options), name="specserve", route_prefix="/")
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            api.shutdown()

    def test_prompts_go_where_they_were(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(32) as pool:
            homes: dict[str, set[str]] = {}
            cached = []
            for prompt in [f"{index} {'is a number. ' * 4}" for index in range(8)] * 2:
                answer = client.post(
                    "/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 2}
                )
                homes.setdefault(prompt, set()).add(answer.headers["x-replica"])
                cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            busy = {"model": "tiny", "prompt": "the same", "max_tokens": 64, "ignore_eos": True}
            answers = pool.map(lambda _: client.post("/v1/completions", json=busy), range(32))
            shared = {answer.headers["x-replica"] for answer in answers}
        assert all(len(replicas) == 1 for replicas in homes.values())
        assert len(set.union(*homes.values())) == 2
        assert min(cached[8:]) > 0
        assert len(shared) == 2

    def test_replicas_tell_how_late_first_tokens_are(self, url: str) -> None:
        if HAS_RAY:
            pytest.skip("Serve asks them")
        replicas = [each.callable for each in fake_ray.SERVE.deployed[0].running]

        async def measured() -> list[float]:
            """On a loop of its own, so with sessions of its own."""
            found = []
            for replica in replicas:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(replica, "_session", None)
                    found.append((await replica.record_autoscaling_stats())[FIRST_TOKEN])
                    await replica._session.close()
            return found

        first, second = asyncio.run(measured()), asyncio.run(measured())
        assert 0 < min(first) <= max(first) < 60
        assert second == [0, 0]

    def test_errors(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            missing = client.get("/metrics")
            assert missing.status_code == 404
            assert "GET /metrics: no such route here" in missing.json()["error"]["message"]
            refused = client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "n": 0})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "n"
            assert client.get("/health").json() == {"status": "ok"}
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"

    def test_large_bodies(self, url: str) -> None:
        """Refused by the ingress, whether their length is announced or they come in pieces."""
        with httpx.Client(base_url=url, timeout=60) as client:
            for body in (b" " * (MOST + 1), iter([b" " * MOST, b" "])):
                refused = client.post("/v1/completions", content=body)
                assert refused.status_code == 413
                assert refused.json()["error"]["message"] == f"the body is larger than {MOST} bytes"
                assert refused.headers["x-replica"] == ""
            taken = client.post("/v1/completions", content=b" " * MOST)
            assert (taken.status_code, bool(taken.headers["x-replica"])) == (400, True)
            assert client.post("/v1/completions", content=b"[" * MOST).status_code == 400

    def test_a_server_that_dies(self, url: str) -> None:
        async def run() -> Load:
            async with Load(
                url, {"model": "tiny", "max_tokens": 64, "ignore_eos": True}, ["aa", "bb"]
            ) as load:
                await load.until_busy()
                kill_a_server()
                await asyncio.sleep(8 if HAS_RAY else 3)
            return load

        tally = asyncio.run(run()).tally
        assert tally.lost == 0, tally.report()
        assert min(tally.outcomes[WHOLE_OK], tally.outcomes[STREAM_COMPLETE]) >= 4

    def test_it_is_replaced(self, url: str) -> None:
        if HAS_RAY:
            pytest.skip("Serve takes 15 seconds to find out")
        replicas = fake_ray.SERVE.deployed[0]
        replicas.check_health()
        names = {each.replica_id.unique_id for each in replicas.running}
        assert len(names) == 2
        assert "replica2" in names
        answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200
