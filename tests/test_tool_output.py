"""Files that tools write: never over something else, and whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from specserve.tools.datastore.__main__ import main as datastore
from specserve.tools.files import check_output, replacing
from specserve.tools.token_map.__main__ import main as token_map
from specserve.tools.tune.__main__ import main as tune


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.txt"
    path.write_text("a text of a few tokens\n")
    return path


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in (("pipe", "is not a file"), (".", "is not a file"), ("none/a", "is not a directory")):
        with pytest.raises(ValueError, match=words):
            check_output("--output", tmp_path / path, {})


def test_an_input_is_no_output(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = str(data.parent / "." / data.name)
    assert datastore(["--data", str(data), "--output", same]) == 2
    assert token_map(["--data", str(data), "--output", same]) == 2
    shape = ["--speculative-algorithm", "EAGLE3"]
    assert tune([*shape, "--prompts", str(data), "--json", same]) == 2
    assert tune([*shape, "--output", "x.yaml", "--json", "x.yaml"]) == 2
    assert token_map(["--data", str(data), "--output", "/no/where/x.pt"]) == 2
    told = capsys.readouterr().err
    assert "error: --output: /no/where is not a directory" in told
    assert told.count("is also --data") == 2
    assert f"error: --json: {same} is also --prompts" in told
    assert "error: --json: x.yaml is also --output" in told
    assert data.read_text() == "a text of a few tokens\n"


def test_what_fails_leaves_the_old_file(data: Path) -> None:
    link = data.with_name("link")
    link.symlink_to(data)

    def break_off() -> None:
        with replacing("--output", link) as to:
            to.write_text("half")
            raise OSError("full")

    with pytest.raises(ValueError, match=r"--output: .*link can't be written: full"):
        break_off()
    assert data.read_text() == "a text of a few tokens\n"
    with replacing("--output", link) as to:
        to.write_text("new")
    assert (link.is_symlink(), data.read_text()) == (True, "new")
    assert sorted(each.name for each in data.parent.iterdir()) == ["data.txt", "link"]


def test_pytorch_says_that_the_disk_is_full(tmp_path: Path) -> None:
    def fill() -> None:
        with replacing("--output", tmp_path / "a.pt"), open("/dev/full", "wb") as file:
            torch.save({"a": torch.zeros(100_000)}, file)

    with pytest.raises(ValueError, match=r"--output: .*a\.pt can't be written: .*No space left on device"):
        fill()
