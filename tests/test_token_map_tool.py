"""``python -m specserve.token_map``: what is counted, written and refused; and a server's statistics."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from specserve.config.paths import BUNDLED_MODEL
from specserve.frontend.generation import TokenStatistics
from specserve.frontend.tokenizer import Tokenizer
from specserve.models.draft.token_map import read_token_map
from specserve.tools.token_map.__main__ import main, model_directory
from specserve.tools.token_map.count import count_files, count_server
from specserve.tools.token_map.ranking import Ranking
from specserve.tools.train.chat import Encoder
from tests.front.conftest import Serve, serve
from tests.front.fakes import byte_tokenizer

__all__ = ["serve"]  # a fixture
SIZE = 256
VOCAB = 260  # of the byte tokenizer: 256 ends, 257 is special


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + "\n")
    return path


def counted(path: Path, template: bool = True) -> dict[int, int]:
    encoder = Encoder(byte_tokenizer() if template else byte_tokenizer(None))
    counts_V = count_files([path], encoder, VOCAB)
    return {int(i): int(counts_V[i]) for i in np.flatnonzero(counts_V)}


def tally(text: str) -> dict[int, int]:
    return {byte: text.encode().count(byte) for byte in sorted(set(text.encode()))}


# Counting.


def test_text_and_prompts(tmp_path: Path) -> None:
    plain = tmp_path / "text.md"
    plain.write_text("aab\nb é")
    assert counted(plain) == tally("aab\nb é")
    assert counted(lines(tmp_path / "a.jsonl", {"text": "aab"}, {"prompt": "bc"})) == tally("aabbc")


def test_conversations(tmp_path: Path) -> None:
    """What the assistant said, as the template has it; all where it said nothing or nobody says how."""
    question, answer = {"role": "user", "content": "qq"}, {"role": "assistant", "content": "xyz"}
    said = lines(tmp_path / "said.jsonl", {"messages": [question, answer, question]})
    assert counted(said) == tally("xyz\n")
    parts = {"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "yz"}]}
    assert counted(lines(tmp_path / "parts.jsonl", {"messages": [question, parts]})) == tally("xyz\n")
    assert counted(said, template=False) == tally("qqxyzqq")
    assert counted(lines(tmp_path / "asked.jsonl", {"messages": [question, question]})) == tally("qqqq")
    turns = [{"from": "human", "value": "qq"}, {"from": "gpt", "value": "xyz"}]
    assert counted(lines(tmp_path / "other.jsonl", {"conversations": turns})) == tally("xyz\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "expected a JSON object, found list"),
        ("{", "line 1: Expecting property name"),
        ('{"answer": "x"}', "expected messages, conversations, or prompt or text as a string, found answer"),
        ('{"messages": [{"role": "user", "content": null}]}', "messages.0.content: this field is"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "file"}]}]}',
            "messages.0.content.0.type: Input should be 'text'",
        ),
        ('{"conversations": [{"from": "gpt", "value": null}]}', "conversations.0.value: must be text"),
    ],
)
def test_lines_that_are_nothing(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(
        ValueError, match=rf"--data: .*bad\.jsonl, line 1: .*{words.removeprefix('line 1: ')}"
    ):
        counted(path)


# Ranking.


def test_order_and_coverage() -> None:
    counts_V = np.array([0, 5, 0, 9, 1, 0, 0, 0])
    ranking = Ranking(counts_V, [], kept=[6])
    assert ranking.best(2) == [3, 6]
    assert ranking.best(3) == [3, 1, 6]
    assert ranking.best(6) == [3, 1, 4, 0, 2, 6]
    assert ranking.coverage(2) == pytest.approx(9 / 15)
    assert ranking.coverage(4) == 1
    for size in (1, 9):
        with pytest.raises(
            ValueError, match=f"--size: must be from 2, .* to 8, its vocabulary; found {size}"
        ):
            ranking.best(size)


def test_ranks_weigh_as_much_as_counts() -> None:
    none_V = np.zeros(8, np.int64)
    assert Ranking(none_V, [[5, 2, 7]], []).best(4) == [5, 2, 7, 0]
    counts_V = np.array([0, 0, 60, 30, 10, 0, 0, 0])
    assert Ranking(counts_V, [[5, 2]], []).best(4) == [2, 5, 3, 4]  # 60 + 33, 67, 30, 10


# The command.


def test_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text, a map and the sizes; every format holds the same ids, and the special tokens."""
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    (tmp_path / "map.txt").write_text("4000\n3999\n")
    found = []
    for suffix in (".pt", ".json", ".txt"):
        output = tmp_path / f"out{suffix}"
        sources = ["--data", str(tmp_path / "text.txt"), "--map", str(tmp_path / "map.txt")]
        assert main([*sources, "--size", str(SIZE), "--output", str(output)]) == 0
        found.append(read_token_map(output, 4096).tolist())
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == SIZE
    words = Tokenizer.load(str(BUNDLED_MODEL)).encode("The quick brown fox")
    assert set(found[0]) >= {*range(6), *words, 4000, 3999}
    assert found[0][0] == 4000  # two thirds of as many as were counted
    said = capsys.readouterr().out
    assert f"out.pt: {SIZE} of 4096 ids, 6 of them special" in said
    assert "256 ids    6.25%    100.00%  <- written" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "/no/where.txt"], "--data: /no/where.txt can't be read"),
        (["--map", "/no/where.pt"], "/no/where.pt is not a token map"),
        (
            ["--server", "127.0.0.1:30000"],
            "--server: 127.0.0.1:30000 can't be reached: unknown url type: 127.0.0.1",
        ),
        (["--map", "MAP", "--size", "6"], "--size: must be from 7"),
        (["--map", "MAP", "--model-path", "/no/model"], "--model-path: /no/model does not exist"),
        (["--data", "EMPTY"], "no token was counted in"),
    ],
)
def test_mistakes(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "EMPTY").touch()
    (tmp_path / "map.txt").write_text("1 2 3")
    places = {"MAP": str(tmp_path / "map.txt"), "EMPTY": str(tmp_path / "EMPTY")}
    given = [places.get(each, each) for each in arguments]
    assert main([*given, "--output", str(tmp_path / "out.pt")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()


def test_a_revision_of_a_local_directory_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_directory(str(tmp_path), "main")
    assert caplog.messages == [f"--revision has no effect: {tmp_path} is a local directory"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--output", "x.csv", "--map", "a"], "--output: must end in .pt, .json, .txt, found x.csv"),
        (["--output", "x.pt"], "nothing to count: expected one or more of --data, --server and --map"),
    ],
)
def test_commands_that_can_not_be(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert words in capsys.readouterr().err


# A server's statistics.


def test_statistics() -> None:
    found = TokenStatistics()
    assert found.report() == (0, [])
    found.count([5, 7, 5])
    found.count([2])
    assert found.report() == (4, [(5, 2), (2, 1), (7, 1)])


def test_endpoint(serve: Serve) -> None:
    client, _ = serve("abca", token_statistics=True)
    client.post("/v1/completions", json={"model": "tiny", "prompt": "zz"})
    client.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "z"}]}
    )
    found = client.get("/token_statistics").json()
    assert found == {"tokens": 10, "counts": [[97, 4], [98, 2], [99, 2], [256, 2]]}


def test_what_a_stop_string_cuts_is_not_counted(serve: Serve) -> None:
    client, _ = serve("abcdef", token_statistics=True)
    client.post("/v1/completions", json={"model": "tiny", "prompt": "z", "stop": "b", "stream": True})
    assert client.get("/token_statistics").json() == {"tokens": 2, "counts": [[97, 1], [98, 1]]}


def test_off_by_default(serve: Serve) -> None:
    client, _ = serve()
    answer = client.get("/token_statistics")
    assert answer.status_code == 404
    assert "start the server with --token-statistics" in answer.json()["error"]["message"]


def test_the_key_is_asked_for(serve: Serve) -> None:
    client, _ = serve(token_statistics=True, api_key=("key",))
    assert client.get("/token_statistics").status_code == 401
    assert client.get("/token_statistics", headers={"Authorization": "Bearer key"}).status_code == 200


class Answers(BaseHTTPRequestHandler):
    """A server with a key."""

    body = b""

    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == "Bearer key" and self.path == "/token_statistics"
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(self.body if allowed else b'{"error": {"message": "no key"}}')

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Answers, "body", b'{"tokens": 5, "counts": [[7, 4], [2, 1]]}')
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_counts_of_a_server(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_server(url, "key", 8).tolist() == [0, 0, 1, 0, 0, 0, 0, 4]
    with pytest.raises(ValueError, match=r"--server: .* answered 401: no key"):
        count_server(url, None, 8)
    with pytest.raises(ValueError, match="counted token id 7; those of --model-path are 0 to 6"):
        count_server(url, "key", 7)
    for body in (b"no json", b"[]", b'{"counts": [[1, 2, 3]]}'):
        monkeypatch.setattr(Answers, "body", body)
        with pytest.raises(ValueError, match="has no token statistics"):
            count_server(url, "key", 8)
    monkeypatch.setattr(Answers, "body", b'{"counts": []}')
    assert not count_server(url, "key", 8).any()
