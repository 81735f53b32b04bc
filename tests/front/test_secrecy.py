"""A server's log contains ids, but never keys or prompts, whatever goes wrong. And the limits on checkpoints."""

from __future__ import annotations

import ast
import contextvars
import hashlib
import hmac
import json
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

import specserve
from specserve.frontend.tokenizer import Tokenizer
from specserve.logs import REQUEST_ID, configure_logging
from tests.front.conftest import Serve
from tests.front.fakes import byte_tokenizer
from tests.front.processes import Server, running

KEY, OTHER, WRONG, SECRET = "k3y-of-the-server", "k3y-of-a-team", "k3y-of-somebody", "xyzzyplugh"
IDS = ", ".join(str(byte) for byte in SECRET.encode()[:4])
MODEL = {"model": "tiny"}
CHAT = {**MODEL, "messages": [{"role": "user", "content": SECRET}]}
TEXT = {**MODEL, "prompt": SECRET, "max_tokens": 20}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Logs all it can. Prompts are longer than its tokenizer likes."""
    model = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 40
    tokenizer.save_pretrained(model)
    flags = ("--api-key", KEY, "other=" + OTHER, "--log-level", "debug", "--log-format", "json")
    with running("build_echo", model, *flags) as found:
        yield found.wait_ready()


def call(server: Server, path: str, key: str = KEY, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", **fields.pop("headers", {})}
    return httpx.post(server.url + path, headers=headers, timeout=30, **fields)


def use(server: Server) -> dict[str, int]:
    """Requests of all kinds that hold the secret. Returns statuses by request id."""
    chat, text = "/v1/chat/completions", "/v1/completions"
    broken = json.dumps(CHAT).encode()[:-2]
    answers = [
        call(server, chat, json=CHAT),
        call(server, text, json={**TEXT, "stream": True}),
        call(server, text, json={**TEXT, "logprobs": 1, "echo": True}),
        call(server, text, json=TEXT, headers={"x-request-id": "client:1"}),
        call(server, text, json=TEXT, headers={"x-request-id": "no id\tof ours"}),
        call(server, text, key=WRONG, json=TEXT),
        call(server, text, json={**TEXT, "prompt": SECRET * 100}),
        call(server, text, json={**TEXT, SECRET: 1}),
        call(server, text, json={**TEXT, "stop": {"a": SECRET}}),
        call(server, text, json={**TEXT, "seed": 13}),
        call(server, chat, json={**CHAT, "messages": [{"role": SECRET, "content": SECRET}]}),
        call(server, chat, json={**CHAT, "messages": [{"role": "user", "content": "boom"}]}),
        call(server, chat, content=broken, headers={"content-type": "application/json"}),
        call(server, "/tokenize", key=OTHER, json={"prompt": SECRET}),
        call(server, "/v1/" + "none"),
        call(server, text, json={**TEXT, "seed": 14}),  # the engine dies of it
    ]
    for answer in answers:
        assert "x-request-id" in answer.headers
    return {answer.headers["x-request-id"]: answer.status_code for answer in answers}


def test_headers_are_bounded(server: Server) -> None:
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 200_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert server.get("/health")[0] == 200


def test_log_holds_ids_and_no_secrets(server: Server) -> None:
    statuses = use(server)
    assert statuses.pop("client:1") == 200
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in statuses)
    assert sorted(statuses.values()) == [200] * 5 + [400] * 7 + [401, 404, 503]
    server.stop()
    text = "".join(server.lines)
    assert "the fake engine died of seed 14" in text, "errors are logged"
    for name, status in {**statuses, "client:1": 200}.items():
        assert re.search(rf"{name}.*{status} after|{status} after .*{name}", text), (name, status)
    for secret in (KEY, OTHER, WRONG, SECRET, IDS, "boom"):
        assert secret not in text
    lines = [json.loads(line) for line in server.lines]
    assert not any("sequence length is longer" in line["message"] for line in lines)
    assert all({"time", "level", "module", "message"} <= set(line) for line in lines)
    assert any("RuntimeError" in line.get("exception", "") for line in lines)
    named = [line["message"] for line in lines if line.get("request_id") == "client:1"]
    assert [words.split(":")[0].split("-")[0] for words in named] == ["cmpl", "POST /v1/completions"]


def test_lines_of_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.Logger("root")
    monkeypatch.setattr(logging, "root", root)
    configure_logging("info")
    log = logging.LogRecord("a.b", logging.INFO, "", 0, "%d done", (2,), None)
    root.handle(log)
    contextvars.copy_context().run(lambda: (REQUEST_ID.set("id-1"), root.handle(log)))
    plain, named = capsys.readouterr().err.splitlines()
    assert plain.endswith(" INFO a.b: 2 done")
    assert named.endswith(" INFO a.b: [id-1] 2 done")


OTHERS = """
import logging, warnings
from specserve.logs import adopt_loggers, configure_logging
library = logging.getLogger("a_library")
library.addHandler(logging.StreamHandler())
library.propagate = False
library.setLevel(logging.WARNING)
configure_logging({level!r}, "json")
adopt_loggers()
library.warning("so so")
library.error("bad")
warnings.warn("old")
"""


@pytest.mark.parametrize(
    ("level", "modules"), [("error", ["a_library"]), ("warning", ["a_library", "a_library", "py.warnings"])]
)
def test_what_others_say(level: str, modules: list[str]) -> None:
    """Warnings and libraries that print by themselves come out as all else does, and only from the level on."""
    found = subprocess.run(
        [sys.executable, "-c", OTHERS.format(level=level)], capture_output=True, text=True, check=True
    )
    assert [json.loads(line)["module"] for line in found.stderr.splitlines()] == modules


def test_internal_errors_have_ids(serve: Serve) -> None:
    client, _ = serve()
    answer = client.post("/v1/completions", json={**MODEL, "prompt": "a", "seed": 14})
    assert (answer.status_code, len(answer.headers["x-request-id"])) == (500, 32)


def test_the_client_knows_the_id(serve: Serve) -> None:
    http, _ = serve()
    with openai.OpenAI(api_key="x", base_url="http://testserver/v1", http_client=http) as client:
        found = client.completions.create(model="tiny", prompt="a", extra_headers={"x-request-id": "mine-1"})
    assert found._request_id == "mine-1"


def test_code_of_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    """Unless it is trusted."""
    path, ran = tmp_path / "model", tmp_path / "ran"
    byte_tokenizer().save_pretrained(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["own.Own", "own.Own"]}
    config["tokenizer_class"] = "Own"
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        f"open({str(ran)!r}, 'w').close()\n"
        "class Own(PreTrainedTokenizerFast): pass\n"
    )
    try:
        Tokenizer.load(str(path))
    except ValueError as error:
        assert "trust_remote_code" in str(error)  # noqa: PT017 - whether it loads is the library's choice
    assert not ran.exists()
    Tokenizer.load(str(path), trust_remote_code=True)
    assert ran.exists()


def test_keys_are_compared_in_constant_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def recording(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return compare(given, expected)

    monkeypatch.setattr(hmac, "compare_digest", recording)
    client, _ = serve(api_key=(KEY,))
    for key, status in ((KEY, 200), (WRONG, 401), ("", 401)):
        for headers, given in (
            ({"authorization": f"Bearer {key}"}, (key, "")),
            ({"x-api-key": key}, ("", key)),
        ):
            assert client.get("/v1/models", headers=headers).status_code == status
            assert compared == [(each.encode(), KEY.encode()) for each in given]
            compared.clear()


def test_usage_by_key(serve: Serve) -> None:
    """Under names or digests. Keys are in no metric, no setting and no line of the log."""
    client, _ = serve("abc", api_key=("team-a=k3y-1", "c2VjcmV0IGtleSBvZiBvdXJzLg==", "team-a=k3y-2", WRONG))
    keys = ("k3y-1", "k3y-2", "c2VjcmV0IGtleSBvZiBvdXJzLg==", "c2VjcmV0IGtleSBvZiBvdXJzLg==")
    for key in keys:
        sent = {"authorization": f"Bearer {key}"}
        assert client.post("/v1/completions", json={**MODEL, "prompt": "ab"}, headers=sent).status_code == 200
    assert client.post("/v1/completions", json={}, headers={"x-api-key": "k3y-1"}).status_code == 400
    for key in ("team-a=k3y-1", "team-a", "c2VjcmV0IGtleSBvZiBvdXJzLg", ""):
        assert client.get("/v1/models", headers={"x-api-key": key}).status_code == 401
    shown = client.get("/metrics").text
    found = re.findall(r'^specserve_key_(\w+)_total{key="(.*)"} (\S+)$', shown, re.M)
    digest = hashlib.sha256(b"c2VjcmV0IGtleSBvZiBvdXJzLg==").hexdigest()[:8]
    assert found == [
        ("requests", "team-a", "3.0"), ("requests", digest, "2.0"),
        ("prompt_tokens", "team-a", "4.0"), ("prompt_tokens", digest, "4.0"),
        ("answer_tokens", "team-a", "8.0"), ("answer_tokens", digest, "8.0"),
    ]  # fmt: skip
    info = client.get("/server_info", headers={"x-api-key": "k3y-1"}).text
    assert not any(key in text for key in (*keys, WRONG) for text in (shown, info))


def test_one_key_has_no_usage_of_its_own(serve: Serve) -> None:
    client, _ = serve(api_key=(KEY,))
    assert client.get("/v1/models", headers={"x-api-key": KEY}).status_code == 200
    assert 'key="' not in client.get("/metrics").text


def test_no_file_is_unpickled_with_code() -> None:
    """Each ``torch.load`` reads weights only; a process and its children read what they send each other."""
    pipes = {
        "process/compile.py": "pickle.load(sys.stdin.buffer)",
        "process/follower.py": "pickle.loads(first)",
        "process/followers.py": "pickle.loads(message)",
    }
    loads = []
    package = Path(specserve.__file__).parent
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in ("torch", "pickle"):
                name = ast.unparse(node.func)
                if ast.unparse(node) == pipes.get(file.relative_to(package).as_posix()):
                    continue
                assert name not in ("pickle.load", "pickle.loads", "pickle.Unpickler"), file
                if name == "torch.load":
                    loads.append("weights_only=True" in ast.unparse(node))
    assert loads
    assert all(loads)


def test_addresses_of_downloads_are_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be signed."""
    monkeypatch.setattr(logging, "root", logging.Logger("root"))
    configure_logging("info")
    for name in ("httpx", "httpx2"):
        assert not logging.getLogger(name).isEnabledFor(logging.INFO)
