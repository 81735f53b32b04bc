"""The serving benchmark measures an unknown server and reports failures."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks import serving

GAP = 0.05


class Handler(BaseHTTPRequestHandler):
    """Answer with the requested number of tokens, two per chunk, 50 ms apart; refuse prompts of 13 tokens."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if len(asked["prompt"]) == 13:
            self.send_response(400)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for _ in range(asked["max_tokens"] // 2):
            time.sleep(GAP)
            self._send({"choices": [{"text": "a b"}]})
        self._send({"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}})
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, event: object) -> None:
        self._chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def load(url: str, **given: object) -> serving.Load:
    defaults: dict[str, object] = {
        "model": "m", "prompt_tokens": 5, "new_tokens": 8, "spread": False, "text": False, "vocab": 100, "seed": 0,
        "api_key": None,
    }  # fmt: skip
    return serving.Load(url=url, **{**defaults, **given})  # type: ignore[arg-type]


def test_a_closed_loop(url: str) -> None:
    answers = serving.run(load(url, clients=3, rounds=2))
    found = serving.summary(answers, slo_ttft=1e3, slo_tpot=1e3)
    assert (found["requests"], found["failed"]) == (6, 0)
    assert all(answer.tokens == 8 and len(answer.gaps) == 3 for answer in answers)
    assert found["ttft_ms"]["p50"] >= 1e3 * GAP
    assert 1e3 * GAP <= found["gap_ms"]["p50"] < 3e3 * GAP
    assert found["tpot_ms"]["p50"] == pytest.approx(3 / 7 * found["gap_ms"]["p50"], rel=0.4)
    assert found["goodput_per_second"] == found["requests_per_second"]
    assert serving.summary(answers, slo_ttft=1.0, slo_tpot=1e3)["goodput_per_second"] == 0


def test_requests_that_arrive(url: str) -> None:
    answers = serving.run(load(url, rate=20.0, seconds=0.5, spread=True))
    assert len(answers) >= 2
    assert len({answer.tokens for answer in answers}) > 1


def test_what_fails_is_told(url: str) -> None:
    found = serving.summary(serving.run(load(url, clients=1, rounds=2, prompt_tokens=13)), 1e3, 1e3)
    assert (found["requests"], found["failed"], found["tokens_per_second"]) == (2, 2, 0)
    assert "400" in found["errors"][0]
    found = serving.summary(serving.run(load("http://127.0.0.1:9", clients=1, rounds=1)), 1e3, 1e3)
    assert found["failed"] == 1


def test_the_command(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--url", url, "--model", "m", "--clients", "1", "3", "--rounds", "1", "--prompt-tokens", "4"]
    serving.main([*given, "--new-tokens", "4", "--processes", "2", "--json", str(tmp_path / "x.json")])
    assert capsys.readouterr().out.count("tokens_per_second") == 2
    assert json.loads((tmp_path / "x.json").read_text())["loads"]["3"]["requests"] == 3


def test_it_needs_the_standard_library_alone() -> None:
    """So that one script measures every server, whatever is installed next to it."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-S", "-c", "import benchmarks.serving"]
    subprocess.run(command, cwd=root, env={"PYTHONPATH": str(root)}, check=True)
