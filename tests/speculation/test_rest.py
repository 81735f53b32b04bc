"""REST: published datastores, lookups in them, and no text changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specserve.config import make_settings
from specserve.core import SamplingParams
from specserve.process.assemble import resolve_engine
from specserve.speculation.datastore import Datastore
from specserve.tools.datastore.__main__ import main, write_datastore
from tests.engines import Checkpoints, answer_one
from tests.reference.rest import look_up, write
from tests.speculation.methods import PROMPT, check_texts, in_each_configuration
from tests.speculation.test_earlier_answers import texts

DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def stored(agreeing: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """With a datastore of what the target says."""
    path = tmp_path_factory.mktemp("rest") / "texts.idx"
    said = [
        answer_one(agreeing.scheduler("NONE", None), PROMPT, msgspec.structs.replace(DRAWN, seed=seed)).tokens
        for seed in (3, 4)
    ]
    write_datastore(path, said, 64)
    return replace(agreeing, others={**agreeing.others, "REST": path})


@pytest.mark.parametrize("width", ["H", "i"])
@pytest.mark.parametrize("vocabulary", [2, 5, 50])
def test_finds_what_a_look_at_every_place_finds(vocabulary: int, width: str, tmp_path: Path) -> None:
    rng = random.Random(vocabulary)
    chunks = [[token for text in texts(rng, 10, vocabulary) for token in text] for _ in range(3)]
    write(tmp_path / "a.idx", chunks, width)
    store = Datastore(tmp_path / "a.idx", vocabulary)
    assert (store.size, len(store.chunks)) == (sum(map(len, chunks)), 3)
    hits = 0
    for text in [*texts(rng, 20, vocabulary), *(chunk[i : i + 9] for chunk in chunks for i in range(9))]:
        for most in (3, 64):
            expected = look_up(chunks, text, most)
            assert store.find("", text, most) == expected
            hits += bool(expected[0])
    assert hits > 20


@pytest.mark.parametrize(("vocabulary", "width"), [(2**16, "H"), (2**16 + 1, "i")])
def test_files_are_those_of_the_format(vocabulary: int, width: str, tmp_path: Path) -> None:
    rng = random.Random(1)
    said = texts(rng, 12, vocabulary - 1)
    joined = [token for text in said for token in text]
    size = len(joined)
    assert write_datastore(tmp_path / "a.idx", said, vocabulary, chunk=100) == size
    write(tmp_path / "b.idx", [joined[i : i + 100] for i in range(0, size, 100)], width)
    assert (tmp_path / "a.idx").read_bytes() == (tmp_path / "b.idx").read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "it ends within a chunk"),
        (lambda data: b"", "cannot mmap an empty file"),
        (lambda data: data[:12] + b"\x0c\0\0\0" + data[16:28], "does not fit"),
        (lambda data: data[:-4] + b"\1\0\0\0", "not in order"),
        (lambda data: data[:-4] + b"\7\0\0\0", "places outside of a chunk's 4 tokens"),
        (lambda data: data.replace(b"\5\0", b"\100\0"), "ids from 1 to 64, the model has 64"),
    ],
)
def test_other_files_are_refused(change: Callable[[bytes], bytes], words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.idx"
    write(path, [[1, 2, 3, 5]], "H")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(
        ValueError, match=rf"--speculative-datastore: .*{words}.*specserve.datastore writes one"
    ):
        Datastore(path, 64)


@in_each_configuration
def test_every_text_is_that_of_plain_decoding(configuration: dict[str, Any], stored: Checkpoints) -> None:
    check_texts(stored, "REST", (4, 3, 9), configuration)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_what_is_stored_is_proposed_whole(overlap: str, stored: Checkpoints) -> None:
    given = {"speculative_datastore": str(stored.others["REST"]), "overlap_schedule": overlap}
    answer = answer_one(stored.scheduler("REST", (6, 1, 7), **given), PROMPT, DRAWN)
    assert answer.tokens == answer_one(stored.scheduler("NONE", None), PROMPT, DRAWN).tokens
    assert answer.runs.count(7) >= 4
    scheduler = stored.scheduler("EAGLE3+REST", (2, 1, 9), **given)
    assert answer_one(scheduler, PROMPT, DRAWN).tokens == answer.tokens
    assert scheduler.stats().step_totals.sources["REST"].accepted > 10


def test_settings(stored: Checkpoints) -> None:
    target, store = str(stored.target), str(stored.others["REST"])
    with pytest.raises(ValueError, match="--speculative-datastore: needed for --speculative-algorithm REST"):
        resolve_engine(make_settings(model_path=target, speculative_algorithm="REST"))
    given = {"model_path": target, "speculative_datastore": store}
    _, notes, config = resolve_engine(make_settings(**given, speculative_algorithm="NGRAM"))
    assert any("--speculative-datastore has no effect: NGRAM uses no datastore" in note for note in notes)
    assert config.draft is not None
    assert config.draft.datastore is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the bundled model's tokens."""
    data, output = tmp_path / "a.txt", tmp_path / "a.idx"
    data.write_text("One day the cat sat on the mat. " * 20)
    assert main(["--data", str(data), "--output", str(output)]) == 0
    assert "tokens" in capsys.readouterr().out
    assert Datastore(output, 2**16).size > 100
    data.write_text("")
    assert main(["--data", str(data), "--output", str(output)]) == 2
    assert "--data: contains no tokens" in capsys.readouterr().err
