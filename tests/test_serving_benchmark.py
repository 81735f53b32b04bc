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
from typing import Any

import pytest

from benchmarks import serving

GAP = 0.06


class Handler(BaseHTTPRequestHandler):
    """Answer with the requested number of tokens, two per chunk; refuse prompts of 13 tokens."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._whole({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = asked.get("prompt") or asked["messages"][-1]["content"]
        if len(prompt) == 13:
            self._whole({}, 400)
        elif not asked.get("stream"):
            self._whole({"usage": {"prompt_tokens": len(prompt) // 4}})
        else:
            self.server.asked.append(asked)  # type: ignore[attr-defined]
            self._stream(asked["max_tokens"])

    def _whole(self, answer: object, status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, tokens: int) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for _ in range(max(1, tokens // 2)):
            time.sleep(self.server.gap)  # type: ignore[attr-defined]
            self._send({"choices": [{"text": "a b", "delta": {"content": "a b"}}]})
        self._send({"choices": [], "usage": {"completion_tokens": tokens}})
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, event: object) -> None:
        self._chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class Server(ThreadingHTTPServer):
    """``asked``: the bodies of streams."""

    request_queue_size = 64

    def __init__(self, gap: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.gap = gap
        self.asked: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(GAP) as made:
        yield made
        made.shutdown()


def load(url: str, **given: Any) -> serving.Load:
    fields = {
        "model": "m", "prompts": "ids", "lengths": "fixed", "prompt_tokens": 5, "new_tokens": 8, "characters": 4.0,
        "vocab": 100, "fields": {"temperature": 0}, "key": "",
    }  # fmt: skip
    return serving.Load(url=url, **{**fields, **given})


def figures(answers: list[serving.Answer], clients: int, **slo: float) -> dict[str, Any]:
    measured = serving.Measured()
    measured.add(answers, clients)
    return measured.figures(**{"slo_ttft": 1e3, "slo_tpot": 1e3, **slo})


def test_a_closed_loop(server: Server) -> None:
    answers = serving.run(load(server.url, clients=3, requests=6))
    assert len(answers) == 6
    assert all(answer.tokens == 8 and len(answer.gaps) == 3 for answer in answers)
    found = figures(answers, clients=0)
    assert (found["requests"], found["failed"]) == (6, 0)
    assert found["ttft_ms"]["p50"] >= 1e3 * GAP
    assert 1e3 * GAP <= found["gap_ms"]["p50"] < 3e3 * GAP
    assert found["tpot_ms"]["p50"] == pytest.approx(3 / 7 * found["gap_ms"]["p50"], rel=0.4)
    assert found["goodput"] == 1
    assert figures(answers, clients=0, slo_ttft=1.0)["goodput"] == 0


def answer(at: float, last: float, tokens: int = 10) -> serving.Answer:
    return serving.Answer(at, 0.0, last, [], tokens)


def test_what_counts_of_a_closed_loop() -> None:
    """Two clients, 10 tokens a second each: neither the first round nor the last counts."""
    answers = [answer(0, 1), answer(0, 2, 20), answer(1, 3, 30), answer(2, 2, 20), answer(4, 1), answer(4, 9)]
    measured = serving.Measured()
    measured.add(answers, clients=2)
    assert measured.rates == [pytest.approx(20)]
    assert [each.at for each in measured.answers] == [1, 2]
    measured.add(answers, clients=0)
    assert measured.rates[1] == pytest.approx(100 / 13)


def test_rounds_of_clients_in_lockstep() -> None:
    """Four clients whose prompts take turns at the beginning of each round: 4 answers of 10 tokens every 5 seconds."""
    rounds, clients = 5, 4
    answers = [
        serving.Answer(5 * n + 0.1 * c, 1 + 0.1 * c, 5, [], 10) for n in range(rounds) for c in range(clients)
    ]
    measured = serving.Measured()
    measured.add(answers, clients)
    assert measured.rates == [pytest.approx(8, rel=0.02)]


def test_requests_that_arrive(server: Server) -> None:
    answers = serving.run(load(server.url, rate=20.0, seconds=0.5, lengths="sharegpt"))
    assert len(answers) >= 2
    assert len({answer.tokens for answer in answers}) > 1


def test_what_fails_is_told(server: Server) -> None:
    found = figures(serving.run(load(server.url, clients=1, requests=2, prompt_tokens=13)), 1)
    assert (found["requests"], found["failed"], found["tokens_per_second"]) == (0, 2, 0)
    assert "400" in found["errors"][0]
    assert figures(serving.run(load("http://127.0.0.1:9", clients=1, requests=1)), 1)["failed"] == 1
    refused = ["--url", server.url, "--prompts", "ids", "--lengths", "fixed", "--prompt-tokens", "13"]
    assert (
        serving.main([*refused, "--clients", "1", "--rounds", "1", "--repeats", "1", "--processes", "1"]) == 1
    )


def test_text(server: Server) -> None:
    """Different messages of about the length that was asked for, the same for every server."""
    given = load(server.url, prompts="text", prompt_tokens=200, clients=1, requests=3)
    serving.run(given)
    serving.run(given)
    said = [asked["messages"][0]["content"] for asked in server.asked]
    assert said[:3] == said[3:]
    assert len(set(said)) == 3
    assert {len(text) for text in said} == {800}
    assert all(any(prompt.endswith(text[-9:]) for prompt in serving.held_out()) for text in said)


def test_an_agent(server: Server) -> None:
    """Each request of a session holds the last one, its answer, and a tool's result."""
    serving.run(load(server.url, prompts="agent", clients=1, requests=1))
    roles = [[message["role"] for message in asked["messages"]] for asked in server.asked]
    assert roles == [["user", *["assistant", "tool"] * turn] for turn in range(serving.TURNS)]
    assert server.asked[1]["messages"][1]["content"] == "a b" * 4
    assert all(asked["tools"] and "ignore_eos" not in asked for asked in server.asked)


def test_requests_of_a_file(server: Server, tmp_path: Path) -> None:
    rows = [
        {"prompt": [1, 2], "max_tokens": 2},
        {"messages": [{"role": "user", "content": "Hi"}], "top_k": 3},
    ]
    (tmp_path / "rows").write_text("\n".join(map(json.dumps, rows)))
    serving.run(load(server.url, prompts=str(tmp_path / "rows"), clients=1, requests=4))
    assert sorted(asked["max_tokens"] for asked in server.asked) == [2, 2, 8, 8]
    assert [asked.get("top_k") for asked in server.asked if "messages" in asked] == [3, 3]


def test_servers_side_by_side(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One is four times as fast: the ratio is of rounds in pairs, and rounds end when the intervals are narrow."""
    with Server(GAP / 4) as fast:
        urls = ["--url", f"slow={server.url}", f"fast={fast.url}"]
        sizes = ["--lengths", "fixed", "--prompt-tokens", "4", "--new-tokens", "4"]
        loop = ["--clients", "1", "3", "--rounds", "3", "--repeats", "4", "--processes", "2"]
        assert serving.main([*urls, *sizes, *loop, "--output", str(tmp_path / "x.json")]) == 0
        fast.shutdown()
    printed = capsys.readouterr().out
    assert printed.count("tokens/s") == 2
    rows = json.loads((tmp_path / "x.json").read_text())["figures"]["3 clients"]
    assert 1.5 < rows["fast"]["ratio"] < 4.5
    assert rows["slow"]["requests"] >= 3 * 3
    assert rows["slow"]["end_to_end_ms"].keys() == {"mean", "p50", "p90", "p95", "max"}, "too few for a p99"


def test_it_needs_the_standard_library_alone() -> None:
    """So that one script measures every server, whatever is installed next to it."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-S", "-c", "import benchmarks.serving"]
    subprocess.run(command, cwd=root, env={"PYTHONPATH": str(root)}, check=True)
