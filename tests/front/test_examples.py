"""Programs shown in the docs, run against a server of the bundled model."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.front.live import Live, live

ROOT = Path(__file__).parents[2]
README = ROOT / "examples" / "clients" / "README.md"
COMMANDS = re.findall(r"^\.venv/bin/python -m (examples\.clients\..+)$", README.read_text(), re.M)
SHAPE = {"num-steps": 5, "eagle-topk": 1, "num-draft-tokens": 6}
FLAGS = [f"--speculative-{name}={value}" for name, value in SHAPE.items()]
PAGES = [ROOT / "README.md", ROOT / "docs" / "quickstart.md"]
SNIPPETS = [
    snippet
    for page in PAGES
    for snippet in re.findall(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```)?", page.read_text(), re.M | re.S)
    if "OpenAI" in snippet[0]  # those of LLM measure steps at their start, which takes long
]
# Times, speeds, and which drafts were accepted: the pages' server has a controller.
VARIES = re.compile(r"\{'steps.*\}|\d+\.\d+%?|\d+ tokens a second")
COLOUR = re.compile(r"\x1b\[\d+m")


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(
        ["--speculative-algorithm", "EAGLE3", "--dtype", "float32", "--device", "cpu", *FLAGS], {}
    ) as found:
        yield found


@pytest.fixture(autouse=True)
def _addressed(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", server.url + "/v1")


def run(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What it prints. ``command``: module and arguments."""
    module, *arguments = shlex.split(command)
    import_module(module).main(arguments)
    return capsys.readouterr().out


def test_every_program_is_shown() -> None:
    programs = {file.stem for file in README.parent.glob("*.py") if "def main" in file.read_text()}
    assert {command.split()[0].rpartition(".")[2] for command in COMMANDS} == programs


@pytest.mark.parametrize("command", COMMANDS)
def test_prints_what_its_page_says(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "offline" in command and torch.cuda.is_available():
        pytest.skip("it takes the GPU, and its page was written on a CPU")
    printed = COLOUR.sub("", run(command, capsys))
    shown = README.read_text().partition(f"-m {command}\n```\n")[2].partition("```\n")[2].partition("```")[0]
    assert printed
    assert VARIES.sub("#", printed) == VARIES.sub("#", shown)


@pytest.mark.parametrize("command", ["chat a", "async_batch --requests 1", "logprobs a", "speculation a"])
def test_says_what_it_can_not_reach(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = "http://127.0.0.1:9/v1"
    monkeypatch.setenv("OPENAI_BASE_URL", nobody)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.0)
    module, *arguments = command.split()
    with pytest.raises(SystemExit, match=f"^no server answers at {nobody}: Connection error.$"):
        import_module(f"examples.clients.{module}").main(arguments)


@pytest.mark.parametrize("argument", ["--at-once=0", "--requests=0", "--at-once=-1"])
def test_batch_of_none(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        import_module("examples.clients.async_batch").main([argument])
    assert "--requests and --at-once must be at least 1" in capsys.readouterr().err


def test_snippets(server: Live, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(SNIPPETS) == 3
    for code, shown in SNIPPETS:
        names: dict[str, Any] = {}
        exec(code.replace("http://127.0.0.1:30000", server.url), names)
        names["client"].close()
        printed = capsys.readouterr().out
        assert any(city in printed for city in ("Rome", "Vienna", "Berlin"))
        assert not shown or VARIES.sub("#", printed.rstrip()) == VARIES.sub("#", shown.rstrip())
