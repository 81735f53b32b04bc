"""Dynamic token maps: no text changes, drafts are within the map, and acceptance improves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from specserve_kernels import Pool, Tree, select_tree
from torch import Tensor

from specserve import LLM, SamplingParams
from specserve.config import Settings, resolve, resolve_paths
from specserve.config.paths import BUNDLED_MODEL
from specserve.layers.linear import Linear, pack_linears
from specserve.methods import MapPlan
from specserve.models.draft.token_map import CopiedRows, IndexedHead
from specserve.models.draft.vocabulary import VocabMap
from specserve.models.read_config import load_model_config
from specserve.models.special_tokens import special_tokens
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.drafters.eagle import EagleDrafter
from specserve.speculation.dynamic_map import DynamicMap, default_size
from tests.engines import Checkpoints, answer_all, answer_one, context_of, drafting, make_scheduler, shaped
from tests.test_token_map import PROMPT, VOCAB, save, work

SIZE = 16
CHAIN, TREE = (3, 1, 4), (3, 2, 6)
DYNAMIC: dict[str, Any] = {
    "speculative_token_map": "dynamic",
    "speculative_token_map_size": SIZE,
    "speculative_token_map_interval": 1,
}
FLAG = "--speculative-token-map"


def live(size: int | None = SIZE, interval: int = 1, step: int = 1, **ids: list[int]) -> DynamicMap:
    """Return a map of the rows of every ``step``-th token."""
    return DynamicMap(MapPlan(size, interval), np.arange(0, VOCAB, step), VOCAB, **ids)


# What is chosen.


def test_the_first_map() -> None:
    assert live().rows_R.tolist() == [*range(SIZE)]
    assert live(kept=[60, 7]).rows_R.tolist() == [*range(SIZE - 1), 60]
    start = live(size=5, start=[50, 3, 40], kept=[60]).rows_R
    assert start.tolist() == [0, 3, 40, 50, 60]
    assert [default_size(rows) for rows in (64, 4000, 4096, 32000, 248_320)] == [64, 1024, 1024, 8000, 32768]


def test_running_texts_come_first() -> None:
    found = live(size=4, interval=2, kept=[0])
    found.enter([9, 9, 8])
    rows = found.look(stepped=False)
    assert rows is not None
    assert rows.tolist() == found.rows_R.tolist() == [0, 1, 8, 9]
    found.observe([7, 9])
    assert found.look(stepped=True) is None
    rows = found.look(stepped=True)
    assert rows is not None
    assert rows.tolist() == [0, 7, 8, 9]
    assert (found.refreshes, found.coverage) == (2, 0.5)
    for _ in range(4):
        assert found.look(stepped=True) is None  # nothing is gained
    assert found.refreshes == 2


def test_what_was_said_stays_for_a_while() -> None:
    """The texts have left; the prompts count no more, the output does until other output is more frequent."""
    found = live(size=2)
    for prompt, said in (([30, 31], [40] * 6 + [41] * 3), ([32], [50, 51] * 8), ([33], [50, 51] * 40)):
        found.enter(prompt)
        found.observe(said)
        found.look(stepped=True)
        found.leave([*prompt, *said])
        found.look(stepped=True)
        assert not found.running_V.any()
        assert found.rows_R.tolist() == sorted({*said})


def test_little_gain_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a thousandth of the text."""
    monkeypatch.setattr("specserve.speculation.dynamic_map.HALF_LIFE", 1e9)
    found = live(size=2)
    found.observe([40] * 5000 + [41] * 2)
    assert found.look(stepped=True) is not None
    found.leave([40] * 5000 + [41] * 2)
    for more, refreshes in ((5, 1), (20, 2)):
        found.observe([42] * more)
        found.leave([42] * more)
        found.look(stepped=True)
        assert found.refreshes == refreshes
    assert found.rows_R.tolist() == [40, 42]


def test_rows_of_a_draft_vocabulary() -> None:
    """Row i of the head stands for token 2 * i; odd ones have no row."""
    found = live(size=3, step=2, kept=[1, 2])
    assert found.rows_R.tolist() == [0, 1, 2]
    found.observe([40, 40, 41, 41, 41])
    assert found.look(stepped=True) is not None
    assert found.rows_R.tolist() == [0, 1, 20]
    found.observe([40] * 5)
    assert found.look(stepped=True) is None
    assert found.coverage == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("size", [2, VOCAB + 1])
def test_sizes_that_do_not_fit(size: int) -> None:
    with pytest.raises(
        ValueError, match=rf"{FLAG}-size: must be more than 2, .* at most 64, .* found {size}"
    ):
        live(size=size, kept=[5, 9])


# The tensors.


def test_tables_are_exchanged_in_place() -> None:
    vocab = VocabMap.of(torch.tensor([3, 9, 60]), VOCAB)
    addresses = [each.data_ptr() for each in (vocab.ids, vocab.inverse)]
    vocab.exchange(torch.tensor([1, 9, 33]))
    expected = VocabMap.of(torch.tensor([1, 9, 33]), VOCAB)
    assert torch.equal(vocab.ids, expected.ids)
    assert torch.equal(vocab.inverse, expected.inverse)
    assert [each.data_ptr() for each in (vocab.ids, vocab.inverse)] == addresses


@pytest.mark.parametrize("bias", [False, True])
def test_rows_are_exchanged(bias: bool) -> None:
    torch.manual_seed(0)
    full, states = Linear(32, VOCAB, bias=bias), torch.randn(7, 32)
    first, second = torch.tensor([1, 5, 40]), torch.tensor([0, 5, 63])
    with torch.inference_mode():
        expected = full(states)
        in_place, copied = IndexedHead(full, first.clone()), CopiedRows(full, first)
        address = in_place.ids_R.data_ptr()
        for rows in (second, first):
            in_place.set_rows(rows)
            torch.testing.assert_close(in_place(states), expected[:, rows])
        pack_linears(full)  # as the target is, after its drafts were made
        for rows in (second, first):
            copied.set_rows(rows)
            torch.testing.assert_close(copied(states), expected[:, rows])
    assert in_place.ids_R.data_ptr() == address
    assert not [*in_place.parameters(), *copied.parameters()]


# Serving.


def drafter_of(scheduler: Scheduler) -> EagleDrafter:
    drafter = context_of(scheduler).drafter
    assert isinstance(drafter, EagleDrafter)
    return drafter


@contextmanager
def check_guesses(scheduler: Scheduler) -> Iterator[list[int]]:
    """Every step guesses tokens of the map of its moment alone. The sizes of the maps' changes."""
    drafter, changes = drafter_of(scheduler), []
    set_rows = drafter.set_rows
    assert drafter.dynamic_map is not None
    assert drafter.vocab is not None

    def checked(pool: Pool, *args: Any, **kwargs: Any) -> Tree:
        assert drafter.dynamic_map is not None
        assert drafter.vocab is not None
        known = set(drafter.vocab.ids.tolist())
        ids_O = drafter.vocabulary.ids_O
        assert ids_O is not None
        assert known == set(ids_O[torch.from_numpy(drafter.dynamic_map.rows_R)].tolist())
        assert set(pool.tokens_BP[pool.scores_BP > -torch.inf].tolist()) <= known
        return select_tree(pool, *args, **kwargs)

    def noted(rows: Tensor) -> None:
        assert drafter.vocab is not None
        before = set(drafter.vocab.ids.tolist())
        set_rows(rows)
        changes.append(len(set(drafter.vocab.ids.tolist()) - before))

    with patch("specserve.speculation.step.select_tree", checked), patch.object(drafter, "set_rows", noted):
        yield changes


@pytest.mark.parametrize(
    ("algorithm", "shape", "indexed"),
    [("EAGLE", CHAIN, False), ("EAGLE", TREE, True), ("EAGLE3", CHAIN, True), ("EAGLE3", TREE, False)],
    ids=str,
)
def test_lossless_while_the_map_changes(
    algorithm: str, shape: tuple[int, int, int], indexed: bool, agreeing: Checkpoints
) -> None:
    """In float64, a map that is looked at in every step, and all kinds of sampling in a batch."""
    plain = answer_all(make_scheduler(agreeing.target), work())
    with patch("specserve.models.draft.token_map.picked_rows", IndexedHead if indexed else CopiedRows):
        scheduler = agreeing.scheduler(algorithm, shape, max_running_requests=4, **DYNAMIC)
    with check_guesses(scheduler) as changes:
        found = answer_all(scheduler, work())
    assert [answer.tokens for answer in found] == [answer.tokens for answer in plain]
    assert drafter_of(scheduler).dynamic_map is not None
    assert drafter_of(scheduler).dynamic_map.refreshes == len(changes) >= 3
    assert all(changes)
    assert drafter_of(scheduler).dynamic_map.coverage is not None
    assert sum(answer.usage.accepted for answer in found) > 20
    assert drafter_of(scheduler).vocab_size == SIZE


def test_the_same_drafts_by_copied_and_indexed_rows(agreeing: Checkpoints) -> None:
    runs = []
    for rows in (CopiedRows, IndexedHead):
        with patch("specserve.models.draft.token_map.picked_rows", rows):
            scheduler = agreeing.scheduler("EAGLE", TREE, max_running_requests=4, **DYNAMIC)
        runs.append([answer.runs for answer in answer_all(scheduler, work())])
    assert runs[0] == runs[1]


def test_a_map_of_all_is_no_map(agreeing: Checkpoints) -> None:
    """Of EAGLE-3's trained rows, too; and nothing is ever gained."""
    for algorithm in ("EAGLE", "EAGLE3"):
        full = answer_all(agreeing.scheduler(algorithm, TREE), work())
        scheduler = agreeing.scheduler(algorithm, TREE, **(DYNAMIC | {"speculative_token_map_size": None}))
        found = answer_all(scheduler, work())
        assert [answer.runs for answer in found] == [answer.runs for answer in full]
        assert drafter_of(scheduler).dynamic_map is not None
        assert drafter_of(scheduler).dynamic_map.refreshes == 0


def test_other_methods_and_float32(agreeing: Checkpoints) -> None:
    """The type that a CPU serves in, where heads are packed; NAIVE_EAGLE runs either head."""
    params = SamplingParams(temperature=0, max_tokens=30)
    plain = make_scheduler(agreeing.target, dtype="float32")
    asked = [(PROMPT[i:], params) for i in range(3)]
    expected = [answer.tokens for answer in answer_all(plain, asked)]
    for algorithm, draft in (("EAGLE", "eagle"), ("EAGLE3", "eagle3"), ("NAIVE_EAGLE", "eagle3")):
        scheduler = make_scheduler(
            agreeing.target, dtype="float32", **drafting(algorithm, getattr(agreeing, draft)), **DYNAMIC
        )
        with check_guesses(scheduler) as changes:
            found = answer_all(scheduler, asked)
        assert [answer.tokens for answer in found] == expected
        assert changes


def test_ended_by_the_client(agreeing: Checkpoints) -> None:
    """A stop string of the front's ends a request by ``abort``; overlap has a launch in flight then."""
    from tests.engines import Client

    scheduler = agreeing.scheduler("EAGLE", CHAIN, overlap_schedule="on", **DYNAMIC)
    client = Client(scheduler)
    client.submit("a", PROMPT, SamplingParams(temperature=0, max_tokens=50))
    while len(client.answers["a"].tokens) < 20:
        client.iterate()
    scheduler.abort("a")
    client.submit("b", PROMPT, SamplingParams(temperature=0, max_tokens=20))
    tokens = client.run()["b"].tokens
    assert drafter_of(scheduler).dynamic_map is not None
    assert not drafter_of(scheduler).dynamic_map.running_V.any()
    plain = make_scheduler(agreeing.target)
    assert tokens == answer_one(plain, PROMPT, SamplingParams(temperature=0, max_tokens=20)).tokens


# Settings.


def given(models: Checkpoints, algorithm: str, **settings: Any) -> Settings:
    draft = None if algorithm == "NONE" else str(models.draft(algorithm))
    return Settings(
        model_path=str(models.target),
        speculative_algorithm=algorithm,
        speculative_draft_model_path=draft,
        **settings,
    )


def test_the_flags(agreeing: Checkpoints, tmp_path: Path) -> None:
    config, start = load_model_config(agreeing.target), save(tmp_path / "start.pt", [60, 5])
    wanted = {"speculative_token_map": "dynamic", "speculative_token_map_start": str(start)}
    for algorithm in ("EAGLE", "EAGLE3"):
        found, notes = resolve(given(agreeing, algorithm, **wanted), config)
        assert found.speculative_token_map_interval == 8
        assert "speculative_token_map_interval = 8: none was given" in notes
        assert resolve(found, config)[0] == found
    alone = {name: value for name, value in DYNAMIC.items() if name != "speculative_token_map"}
    with pytest.raises(ValueError, match=rf"{FLAG}-size needs {FLAG} dynamic, found {FLAG} not set"):
        resolve(given(agreeing, "EAGLE", **alone), config)
    with pytest.raises(ValueError, match=rf"{FLAG}-size needs {FLAG} dynamic, found {FLAG} {start}"):
        resolve(given(agreeing, "EAGLE", **alone, speculative_token_map=str(start)), config)
    plain, notes = resolve(given(agreeing, "NONE", **DYNAMIC), config)
    assert plain == replace(
        plain,
        speculative_token_map=None,
        speculative_token_map_size=None,
        speculative_token_map_interval=None,
    )
    assert any(f"{FLAG}, {FLAG}-size, {FLAG}-interval has no effect" in note for note in notes)
    with pytest.raises(ValueError, match=f"{FLAG}-start: /no/where.pt is neither a file"):
        resolve_paths(given(agreeing, "EAGLE", **(wanted | {"speculative_token_map_start": "/no/where.pt"})))


def test_start_and_special_tokens(agreeing: Checkpoints, tmp_path: Path) -> None:
    start = save(tmp_path / "start.pt", [60, 5])
    kept = special_tokens(agreeing.target, load_model_config(agreeing.target))
    scheduler = agreeing.scheduler(
        "EAGLE", CHAIN, **(DYNAMIC | {"speculative_token_map_size": len(kept) + 2}),
        speculative_token_map_start=str(start),
    )  # fmt: skip
    vocab = drafter_of(scheduler).vocab
    assert vocab is not None
    assert set(vocab.ids.tolist()) >= {60, 5, *kept}
    with pytest.raises(ValueError, match=rf"{FLAG}-size: .* at most 40, the tokens that this draft scores"):
        agreeing.scheduler("EAGLE3", CHAIN, **(DYNAMIC | {"speculative_token_map_size": 41}))
    with pytest.raises(ValueError, match=r"--speculative-eagle-topk: .* has 2 tokens, found 3"):
        agreeing.scheduler("EAGLE", (3, 3, 6), **(DYNAMIC | {"speculative_token_map_size": 2}))


def test_special_tokens_of_the_bundled_model() -> None:
    assert special_tokens(BUNDLED_MODEL, load_model_config(BUNDLED_MODEL)) == [0, 1, 2, 3, 4, 5]


# It pays.


def mean_length(llm: LLM, prompts: Sequence[str]) -> float:
    """Tokens a step, bonus included."""
    outputs = llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=40))
    steps = sum(output.speculation.steps for output in outputs)
    return (sum(output.speculation.accepted for output in outputs) + steps) / steps


@pytest.mark.slow
def test_acceptance_recovers_on_another_domain(tmp_path: Path) -> None:
    """The bundled EAGLE head on code, an eighth of the vocabulary: a map that stays, and one that starts from it."""
    from benchmarks.common import load_prompts

    prompts = [row["prompt"] for row in load_prompts() if "prompt" in row][:4]
    settings = shaped(5, 1, 6) | {"device": "cpu", "max_running_requests": 4}
    lowest = str(save(tmp_path / "lowest.pt", [*range(512)]))
    lengths = {}
    for token_map in (None, lowest, "dynamic"):
        size = {"speculative_token_map_size": 512} if token_map == "dynamic" else {}
        with LLM(speculative_algorithm="EAGLE", speculative_token_map=token_map, **settings, **size) as llm:
            lengths[token_map] = mean_length(llm, prompts)
    assert lengths["dynamic"] > 1.1 * lengths[lowest]
    assert lengths["dynamic"] > 0.9 * lengths[None]


# On a GPU.


@pytest.mark.gpu
def test_captured_steps_read_the_map_of_their_moment(tmp_path: Path) -> None:
    """The bundled model in float32: a look in every step, ids in place, texts those of plain decoding."""
    from benchmarks.common import PROMPTS
    from benchmarks.lossless import make_items, read_prompts
    from tests.test_gpu_step import assert_same, engine, texts

    items = make_items([prompt[:64] for prompt in read_prompts(PROMPTS, BUNDLED_MODEL)], 40, 32)
    with engine(None) as llm:
        expected = texts(llm, items)
    for algorithm in ("EAGLE", "EAGLE3"):
        settings = DYNAMIC | {"speculative_token_map_size": 512}
        with engine((algorithm, 5, 2, 12), max_running_requests=8, **settings) as llm:
            scheduler = llm.engine
            assert isinstance(scheduler, Scheduler)
            assert drafter_of(scheduler).dynamic_map is not None
            drafter = drafter_of(scheduler)
            assert isinstance(drafter.vocabulary.rows, IndexedHead)
            assert drafter.vocab is not None
            tables = (drafter.vocab.ids, drafter.vocab.inverse, drafter.vocabulary.rows.ids_R)
            addresses = [table.data_ptr() for table in tables]
            assert_same(texts(llm, items), expected, items)
            assert drafter_of(scheduler).dynamic_map.refreshes > 3
            assert [table.data_ptr() for table in tables] == addresses
            ids_O = drafter.vocabulary.ids_O
            assert ids_O is not None
            rows = torch.from_numpy(drafter_of(scheduler).dynamic_map.rows_R).to(ids_O.device)
            assert torch.equal(drafter.vocab.ids, ids_O[rows])
