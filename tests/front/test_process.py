"""The whole front as users run it: real processes and sockets, the openai client, a fake scheduler."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from specserve.frontend.tokenizer import Tokenizer
from tests.front.processes import ROOT, RUN, Server, running, wait

HELLO = [{"role": "user", "content": "hello"}]
NO_TEXT = "--skip-tokenizer-init"  # halves the time of a start


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with running("build_slow", model, "--served-model-name", "tiny", "t2", "--api-key", "key") as found:
        yield found.wait_ready()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0) as found:
        yield found


def test_openai_client(server: Server, client: openai.OpenAI) -> None:
    assert server.get("/health")[0] == 200
    assert [model.id for model in client.models.list()] == ["tiny", "t2"]
    whole = client.chat.completions.create(model="t2", messages=HELLO, max_tokens=10)  # type: ignore[arg-type]
    assert whole.choices[0].message.content == "user:hello"
    assert whole.choices[0].finish_reason == "length"
    streamed = client.chat.completions.create(
        model="tiny",
        messages=HELLO,  # type: ignore[arg-type]
        max_tokens=10,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_speculation": True, "min_p": 0.1},
    )
    chunks = list(streamed)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "user:hello"
    assert chunks[-1].usage.completion_tokens == 10
    assert chunks[-1].usage.speculation["steps"] == 5
    found = client.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=4)
    assert [choice.text for choice in found.choices] == ["abab", "cdcd"]
    # An answer can be sent back as it came.
    history = [*HELLO, whole.choices[0].message, {"role": "user", "content": "more"}]
    again = client.chat.completions.create(model="tiny", messages=history, max_tokens=41)  # type: ignore[arg-type]
    assert again.choices[0].message.content == "user:hello\nassistant:user:hello\nuser:more"


def test_no_token_waits_for_an_acknowledgement(server: Server) -> None:
    """Nagle's algorithm would hold chunks back on a connection that is kept alive, for 40 ms on Linux."""
    body = json.dumps({"model": "tiny", "prompt": "ab", "max_tokens": 2, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key\r\ncontent-length: {len(body)}\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    found = []
    with socket.create_connection((host, int(port))) as connection:
        for _ in range(8):
            begin, received = time.perf_counter(), b""
            connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += connection.recv(65536)
            found.append(time.perf_counter() - begin)
    assert sorted(found)[4] < 0.045, f"a step takes 20 ms here: {found}"


def test_openai_client_gets_its_own_errors(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'"):
        client.chat.completions.create(model="gpt-4", messages=HELLO)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)  # type: ignore[arg-type]
    assert error.value.param == "temperature"
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_client_that_leaves_a_stream(server: Server, client: openai.OpenAI) -> None:
    begun = time.monotonic()
    with client.completions.create(model="tiny", prompt="a", max_tokens=250, stream=True) as stream:
        next(iter(stream))
    wait(lambda: server.running() == 0, 5)
    assert time.monotonic() - begun < 1.5, "125 messages of 20 ms would have been needed to end by itself"


def test_client_that_leaves_a_whole_answer(server: Server, client: openai.OpenAI) -> None:
    begun = time.monotonic()
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="tiny", prompt="a", n=3, max_tokens=250, timeout=0.3)
    wait(lambda: server.running() == 0, 5)
    assert time.monotonic() - begun < 1.5
    wait(lambda: 'endpoint="/v1/completions",status="499"' in server.get("/metrics")[1], 5)


def test_many_clients_at_once(client: openai.OpenAI) -> None:
    answers: dict[int, str] = {}

    def ask(index: int) -> None:
        prompt = f"prompt {index};"
        found = client.completions.create(model="tiny", prompt=prompt, max_tokens=len(prompt))
        answers[index] = found.choices[0].text

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {index: f"prompt {index};" for index in range(30)}


def test_engine_that_is_told_to_end_while_it_ends(model: Path) -> None:
    """By a front that heard its last words before its process was gone."""
    with running("build_told_twice", model, "--engine-restarts", "0", NO_TEXT) as server:
        server.wait_ready()
        with (
            openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.APIStatusError, match="the fake engine died"),
        ):
            client.completions.create(model="tiny", prompt=[97], seed=14)
        assert server.finish() == 1
        assert "Exception ignored" not in "".join(server.lines)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_front_has_no_torch_and_leaks_nothing() -> None:
    """For a model that has a configuration the tokenizer's library loads extensions, which may report leaks."""
    with running("build_echo", ROOT / "specserve" / "bundled" / "chat") as server:
        server.wait_ready()
        assert "tokenizers" in server.mapped()
        assert "libtorch" not in server.mapped()
        assert "PyTorch" not in "".join(server.lines)
        assert server.stop() == 0
        assert "leaked" not in "".join(server.lines)


def stuck(method: str) -> str:
    """What makes a server's tokenizer say that it has begun, and never end."""
    return (
        "import sys, threading; from specserve.frontend.tokenizer import Tokenizer;"
        f"Tokenizer.{method} = lambda *_: (print('begun', file=sys.stderr), threading.Event().wait());"
    )


def test_stop_while_tokenizing(model: Path) -> None:
    """Who waits for it is told, and the thread that is at it holds nobody up."""
    arguments = ["build_slow", "--model-path", str(model), "--port", "0", "--drain-timeout", "0.1"]
    server = Server(["-c", stuck("encode") + RUN, *arguments]).wait_ready()
    failures: list[openai.APIStatusError] = []

    def ask() -> None:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
            try:
                client.completions.create(model="tiny", prompt=["a", "b"])
            except openai.APIStatusError as error:
                failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait(lambda: "begun\n" in server.lines, 10)
    assert server.stop() == 0
    asking.join(10)
    assert [(error.status_code, error.code) for error in failures] == [(503, "not_ready")]
    assert "the server is stopping" in failures[0].message
    assert "Traceback" not in "".join(server.lines)


def test_stop_while_the_tokenizer_loads(model: Path) -> None:
    server = Server(["-c", stuck("load") + RUN, "build_slow", "--model-path", str(model), "--port", "0"])
    wait(lambda: "begun\n" in server.lines, 60)
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines)


def test_health_says_what_the_engine_is_at(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    flags = ("--port", str(port), "--timeout-keep-alive", "1", NO_TEXT)
    with running("build_for_ever", model, *flags) as server:
        server.url = f"http://127.0.0.1:{port}"
        wait(lambda: "building\n" in server.lines, 60)
        body = {"status": "starting", "phase": "building for ever"}
        wait(lambda: json.loads(server.get("/health")[1]) == body, 10)
        assert server.get("/health")[0] == 503
        assert server.get("/v1/models")[0] == 503
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as client:
            client.request("GET", "/live")
            assert client.getresponse().read() == b'{"status":"alive"}'
            begun = time.monotonic()
            assert client.sock.recv(1) == b"", "closed after the time that the flag says"
            assert 0.5 < time.monotonic() - begun < 20
        assert server.stop() == 0


def test_engine_ends_with_its_parent(model: Path) -> None:
    with running("build_echo", model, NO_TEXT) as server:
        server.wait_ready()
        engine = server.engine_pid()
        server.process.kill()
        server.finish()
        wait(lambda: not Path(f"/proc/{engine}").exists(), 10)


def test_engine_that_loads_ends_with_its_parent(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running("build_for_ever", model, NO_TEXT) as server:
        wait(lambda: "building\n" in server.lines, 60)
        engine = server.engine_pid()
        server.process.kill()
        try:
            wait(lambda: not Path(f"/proc/{engine}").exists(), 20)
        except AssertionError:
            os.kill(engine, signal.SIGKILL)
            raise
    assert not list(tmp_path.glob("specserve-*")), "its sockets"


@pytest.mark.parametrize("module", ["specserve.server.run", "uvicorn"])
def test_stop_in_the_first_seconds(model: Path, module: str) -> None:
    """While the front imports, before and after the engine's start. The engine is gone when nobody holds the log."""
    at_import = (
        "import os, signal, sys, types; sys.meta_path.insert(0, types.SimpleNamespace(find_spec=lambda name, *_:"
        f"os.kill(os.getpid(), signal.SIGTERM) if name == {module!r} else None));"
    )
    arguments = ["build_for_ever", "--model-path", str(model), "--port", "0"]
    server = Server(["-c", at_import + RUN, *arguments])
    assert server.finish() == 0
    assert "Traceback" not in "".join(server.lines)


def test_port_in_use(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running("build_echo", model, "--port", str(port)) as server:
            assert server.finish() == 2
    assert server.lines == [
        f"error: --host 127.0.0.1 --port {port}: can't listen there: Address already in use\n"
    ]


def test_a_flag_without_effect_is_logged_as_a_warning(model: Path) -> None:
    draft = ["--speculative-algorithm", "NGRAM", "--speculative-draft-model-path", str(model)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = [*draft, "--port", str(taken.getsockname()[1]), "--log-level", "warning"]
        with running("build_echo", model, *flags) as server:
            assert server.finish() == 2
    assert "WARNING" in server.lines[0]
    assert "--speculative-draft-model-path has no effect: NGRAM has no checkpoint" in server.lines[0]
    assert len(server.lines) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-sise", "3"], "--page-sise: unknown flag; the nearest known one is --page-size"),
        (["/no/where"], "--model-path: /no/where does not exist"),
    ],
)
def test_launch_tells_a_mistake_in_one_line(arguments: list[str], message: str) -> None:
    server = Server(["-m", "specserve", *arguments])
    assert server.finish() == 2
    assert server.lines == [f"error: {message}\n"]


def test_tokenizer_that_cannot_be_loaded(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with running("build_echo", model, "--tokenizer-path", str(tmp_path)) as server:
        assert server.finish() == 2
    assert server.lines[-1].startswith(f"error: the tokenizer of {tmp_path} can't be loaded: ")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no tokenizer\.json; --tokenizer-path names another directory"):
        Tokenizer.load(str(tmp_path))
