"""FR-Spec: which files are maps, drafts with a truncated vocabulary, and that no text changes."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from specserve.config import Settings, resolve, resolve_paths
from specserve.core import SamplingParams
from specserve.layers.linear import Linear, pack_linears
from specserve.models.draft import token_map
from specserve.models.draft.token_map import IndexedHead, read_token_map, truncated_head
from specserve.models.read_config import load_model_config
from tests.engines import (
    Checkpoints,
    Drafted,
    Shape,
    answer_all,
    answer_one,
    context_of,
    drafting,
    make_scheduler,
    record_drafts,
)
from tests.reference import eagle
from tests.reference.decode import Request
from tests.reference.models import make_mimo
from tests.speculation.oracle import SAMPLING, Oracle, reference_params
from tests.speculation.test_drafted_tree import check_steps

VOCAB = 64
PROMPT = [1, 5, 9, 33, 60]
COUNT = 8
KEPT = random.Random(4).sample(range(VOCAB), 40)
CHAIN, TREE = (3, 1, 4), (3, 2, 6)


def save(path: Path, ids: object) -> Path:
    torch.save(ids, path)
    return path


@pytest.fixture(scope="module")
def kept_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As published: by frequency, one id twice."""
    return save(tmp_path_factory.mktemp("map") / "freq_40.pt", [*KEPT, KEPT[3]])


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> list[IndexedHead]:
    """Rows are read where they lie, as on a GPU. The heads that do so."""
    made: list[IndexedHead] = []

    def in_place(lm_head: Linear, ids: Tensor) -> IndexedHead:
        made.append(IndexedHead(lm_head, ids))
        return made[-1]

    monkeypatch.setattr(token_map, "truncated_head", in_place)
    return made


class Code:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


def write_json(path: Path, ids: list[int]) -> None:
    path.write_text(json.dumps(ids))


def write_text(path: Path, ids: list[int]) -> None:
    path.write_text("\n".join(map(str, ids)) + "\n")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("freq_5.pt", lambda path, ids: torch.save(ids, path)),
        ("freq_5.pt", lambda path, ids: torch.save(tuple(ids), path)),
        ("tensor.pt", lambda path, ids: torch.save(torch.tensor(ids), path)),
        ("small.bin", lambda path, ids: torch.save(torch.tensor(ids, dtype=torch.int16), path)),
        ("ids.json", write_json),
        ("ids.txt", write_text),
    ],
)
def test_files(name: str, write: Callable[[Path, list[int]], None], tmp_path: Path) -> None:
    """Order is kept, and each id counts once, where it is first."""
    write(tmp_path / name, [17, 3, 63, 3, 0, 17])
    found = read_token_map(tmp_path / name, VOCAB)
    assert found.dtype == torch.int64
    assert found.tolist() == [17, 3, 63, 0]


BAD: list[tuple[object, str]] = [
    ([3, VOCAB], "lists token id 64; the target's ids run from 0 to 63"),
    ([3, -1], "lists token id -1; the target's ids"),
    ([3, 2**70], "lists token id 1180591620717411303424"),
    ([], "lists no ids; expected a list of token ids"),
    ([3, "4"], "entry 1 is '4'; expected a list of token ids"),
    ([3, 4.0], "entry 1 is 4.0"),
    ([True], "entry 0 is True"),
    ({"ids": [3]}, "holds a dict; expected"),
    (torch.tensor([3.0]), r"holds a tensor torch\.float32 \[1\]"),
    (torch.tensor([[3]]), r"holds a tensor torch\.int64 \[1, 1\]"),
    (torch.tensor([True]), r"holds a tensor torch\.bool \[1\]"),
]


@pytest.mark.parametrize(("ids", "words"), BAD)
def test_ids_that_are_none(ids: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as error:
        read_token_map(save(tmp_path / "map.pt", ids), VOCAB)
    assert str(tmp_path / "map.pt") in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("map.pt", b"no pickle"),
        ("map.pt", b""),
        ("map.pt", pickle.dumps(Code(), protocol=2)),
        ("map.json", b"[1, 2"),
        ("map.json", b"\xff\xfe"),
        ("map.txt", b"1 two"),
    ],
)
def test_files_that_are_no_maps(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"{name} is not a token map .*expected a list of token ids"
    ) as error:
        read_token_map(tmp_path / name, VOCAB)
    assert "\n" not in str(error.value)


def test_code_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="can't be read as plain data"):
        read_token_map(save(tmp_path / "map.pt", [1, Code()]), VOCAB)
    assert capsys.readouterr().out == ""


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.pt is not a token map"):
        read_token_map(tmp_path / "gone.pt", VOCAB)


def given(models: Checkpoints, algorithm: str, value: str) -> Settings:
    return Settings(
        model_path=str(models.target),
        speculative_algorithm=algorithm,
        speculative_draft_model_path=None if algorithm == "NONE" else str(models.draft(algorithm)),
        speculative_token_map=value,
    )


def test_the_flag(agreeing: Checkpoints, kept_file: Path) -> None:
    config, flag = load_model_config(agreeing.target), "--speculative-token-map"
    found, _ = resolve(given(agreeing, "EAGLE", str(kept_file)), config)
    assert found.speculative_token_map == str(kept_file)
    with pytest.raises(
        ValueError, match=f"{flag} can't be used with --speculative-algorithm EAGLE3: its heads have"
    ):
        resolve(given(agreeing, "EAGLE3", str(kept_file)), config)
    none, notes = resolve(given(agreeing, "NONE", str(kept_file)), config)
    assert none.speculative_token_map is None
    assert any(flag in note and "has no effect" in note for note in notes)
    with pytest.raises(ValueError, match=f"{flag}: /no/where/map.pt"):
        resolve_paths(given(agreeing, "EAGLE", "/no/where/map.pt"))


def test_a_head_with_rows_of_its_own_is_refused(agreeing: Checkpoints, kept_file: Path) -> None:
    """A method that runs heads of several kinds."""
    drafts, words = drafting("NAIVE_EAGLE", agreeing.eagle3), "an Eagle3Head, has its own output head"
    with pytest.raises(ValueError, match=f"--speculative-token-map: .*{words}"):
        make_scheduler(agreeing.target, **drafts, speculative_token_map=str(kept_file))


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--speculative-token-map", {"speculative_token_map": "NONE"}),
        (
            "--speculative-token-map-start",
            {"speculative_token_map": "dynamic", "speculative_token_map_start": "NONE"},
        ),
    ],
)
def test_a_file_that_is_no_map_is_told_by_its_flag(
    agreeing: Checkpoints, tmp_path: Path, flag: str, settings: dict[str, str]
) -> None:
    file = tmp_path / "passwd"
    file.write_text("root:x:0:0\n")
    given = {name: str(file) if value == "NONE" else value for name, value in settings.items()}
    with pytest.raises(
        ValueError, match=rf"^{flag}: .*passwd is not a token map \(can't be read as plain data\)"
    ):
        agreeing.scheduler("EAGLE", (3, 1, 4), **given)


def test_topk_above_the_map(agreeing: Checkpoints, tmp_path: Path) -> None:
    few = save(tmp_path / "few.pt", [4, 9, 4])
    with pytest.raises(ValueError, match=r"--speculative-eagle-topk: .* has 2 tokens, found 3"):
        agreeing.scheduler("EAGLE", (3, 3, 6), speculative_token_map=str(few))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_heads_are_the_rows_of_the_full_one(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    full, states = Linear(32, VOCAB, bias=bias, dtype=dtype), torch.randn(7, 32, dtype=dtype)
    ids = torch.tensor(KEPT)
    with torch.inference_mode():
        expected = full(states)[:, ids]
        in_place, copied = IndexedHead(full, ids), truncated_head(full, ids)
        torch.testing.assert_close(in_place(states), expected)
        pack_linears(full)  # as the target is, after its drafts were made
        torch.testing.assert_close(copied(states), expected)
    assert not list(in_place.parameters())
    assert isinstance(copied, Linear)
    assert (copied.packed is not None) == (dtype == torch.float32)


@pytest.mark.gpu
def test_no_weight_is_copied_on_a_gpu() -> None:
    full = Linear(64, 500, bias=False, device="cuda", dtype=torch.bfloat16)
    ids = torch.randperm(500, device="cuda")[:130]
    states = torch.randn(5, 64, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        head = truncated_head(full, ids)
        torch.testing.assert_close(head(states), full(states)[:, ids], atol=2**-7, rtol=2**-7)
        assert not list(head.parameters())
        assert isinstance(head, IndexedHead)
        flipped = ids.flip(0)
        head.ids_R.copy_(flipped)
        torch.testing.assert_close(head(states), full(states)[:, flipped], atol=2**-7, rtol=2**-7)


@pytest.mark.gpu
def test_lossless_in_captured_steps(tmp_path: Path) -> None:
    """The bundled model in float32; half of its vocabulary."""
    from benchmarks.common import PROMPTS
    from benchmarks.lossless import make_items, read_prompts
    from specserve.config.paths import BUNDLED_MODEL
    from tests.test_gpu_step import assert_same, engine, texts

    items = make_items([prompt[:64] for prompt in read_prompts(PROMPTS, BUNDLED_MODEL)], 40, 32)
    with engine(None) as llm:
        expected = texts(llm, items)
    half = save(tmp_path / "half.pt", torch.randperm(load_model_config(BUNDLED_MODEL).vocab_size // 2))
    with engine(("EAGLE", 5, 2, 12), speculative_token_map=str(half)) as llm:
        assert_same(texts(llm, items), expected, items)


class MappedOracle(Oracle):
    """The slow draft with its logits over the whole vocabulary restricted to the map's tokens."""

    def draft(self, committed: Sequence[int], path: Sequence[int]) -> Tensor:
        full_V = super().draft(committed, path)
        return eagle.to_target_vocab(full_V[torch.tensor(KEPT)], KEPT, VOCAB)


def check_drafts(models: Checkpoints, kept_file: Path, shape: Shape, params: SamplingParams) -> None:
    """Every step whose depth the request's end does not cut."""
    oracle = MappedOracle(models.target, models.eagle)
    params = msgspec.structs.replace(params, max_tokens=COUNT + shape[0] + 1)
    request = Request(tuple(PROMPT), reference_params(params, PROMPT, choice=1))
    scheduler = models.scheduler("EAGLE", shape, page_size=4, speculative_token_map=str(kept_file))
    with record_drafts() as drafts:
        answer = answer_one(scheduler, PROMPT, params, choice=1)
    assert check_steps(answer, drafts, oracle, request, shape, COUNT) >= 3
    assert answer.tokens[:COUNT] == oracle.plain(request, COUNT)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_drafts_of_a_random_head(
    shape: Shape, sampling: str, random_models: Checkpoints, kept_file: Path
) -> None:
    check_drafts(random_models, kept_file, shape, SAMPLING[sampling])


@pytest.mark.parametrize("sampling", ["greedy", "penalised"])
def test_drafts_by_rows_in_place(
    sampling: str, random_models: Checkpoints, kept_file: Path, indexed: list[IndexedHead]
) -> None:
    check_drafts(random_models, kept_file, TREE, SAMPLING[sampling])
    assert len(indexed) == 1


@pytest.mark.parametrize("sampling", SAMPLING)
def test_text_and_accepted_counts(sampling: str, agreeing: Checkpoints, kept_file: Path) -> None:
    oracle = MappedOracle(agreeing.target, agreeing.eagle)
    params = msgspec.structs.replace(SAMPLING[sampling], max_tokens=COUNT + TREE[0] + 2)
    request = Request(tuple(PROMPT), reference_params(params, PROMPT))
    text, history = oracle.speculative(request, COUNT, TREE)
    scheduler = agreeing.scheduler("EAGLE", TREE, speculative_token_map=str(kept_file))
    answer = answer_one(scheduler, PROMPT, params)
    assert answer.tokens[:COUNT] == text
    assert answer.runs[1 : 1 + len(history)] == [step.accepted + 1 for step in history]


def work() -> Iterator[tuple[list[int], SamplingParams]]:
    rng = random.Random(1)
    for index, params in enumerate([*SAMPLING.values()] * 2):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        yield prompt, msgspec.structs.replace(params, max_tokens=24, seed=None if index == 0 else index)


@pytest.mark.parametrize("shape", [CHAIN, TREE, (5, 4, 16)], ids=str)
def test_lossless_in_every_order(shape: Shape, agreeing: Checkpoints, tmp_path: Path) -> None:
    """A batch's texts are those of plain decoding, and the same drafts are accepted however the file is sorted."""
    plain = answer_all(make_scheduler(agreeing.target), work())
    found = []
    for name, ids in (("by_frequency.pt", KEPT), ("ascending.pt", sorted(KEPT))):
        path = str(save(tmp_path / name, ids))
        scheduler = agreeing.scheduler("EAGLE", shape, speculative_token_map=path)
        drafter = context_of(scheduler).drafter
        assert drafter is not None
        assert drafter.vocab_size == len(KEPT)
        found.append(answer_all(scheduler, work()))
    for answers in found:
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    assert [answer.runs for answer in found[0]] == [answer.runs for answer in found[1]]
    assert sum(answer.usage.accepted for answer in found[0]) > 20


@pytest.mark.parametrize("algorithm", ["NAIVE_EAGLE", "MTP"])
def test_other_methods(algorithm: str, agreeing: Checkpoints, kept_file: Path, tmp_path: Path) -> None:
    model, draft = agreeing.target, str(agreeing.eagle)
    if algorithm == "MTP":
        model, draft = make_mimo(tmp_path / "mimo"), None
    plain = answer_all(make_scheduler(model), work())
    settings = {"speculative_algorithm": algorithm, "speculative_draft_model_path": draft}
    with record_drafts() as drafts:
        scheduler = make_scheduler(model, **settings, speculative_token_map=str(kept_file))
        found = answer_all(scheduler, work())
    assert [answer.tokens for answer in found] == [answer.tokens for answer in plain]
    assert drafts
    for step in drafts:
        assert guessed(step) <= set(KEPT)


def guessed(step: Drafted) -> set[int]:
    return set(step.pool.tokens_BP[step.pool.scores_BP > -torch.inf].tolist())


def test_what_is_not_in_the_map_is_not_drafted(agreeing: Checkpoints, kept_file: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30)
    full = answer_one(agreeing.scheduler("EAGLE", TREE), PROMPT, params)
    with record_drafts() as drafts:
        scheduler = agreeing.scheduler("EAGLE", TREE, speculative_token_map=str(kept_file))
        cut = answer_one(scheduler, PROMPT, params)
    assert cut.tokens == full.tokens
    assert set(full.tokens) - set(KEPT), "the text has tokens that are not in the map"
    for step in drafts:
        assert guessed(step) <= set(KEPT)


def test_float32_on_packed_rows(agreeing: Checkpoints, kept_file: Path) -> None:
    """The type that a CPU serves in, where the target's head is packed and its plain weight let go."""
    params = SamplingParams(temperature=0, max_tokens=20)
    plain = answer_one(make_scheduler(agreeing.target, dtype="float32"), PROMPT, params)
    scheduler = agreeing.scheduler("EAGLE", TREE, speculative_token_map=str(kept_file), dtype="float32")
    assert answer_one(scheduler, PROMPT, params).tokens == plain.tokens
