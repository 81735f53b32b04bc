"""The Triton sampler against the reference's functions composed, mixed requests in one batch.

Shapes: N nodes, R rows of the table, V target vocabulary, A path tokens, E bias entries, C candidates.
"""

from __future__ import annotations

import faulthandler
import math
import random
from dataclasses import dataclass, fields, replace

import pytest
import torch
from specserve_kernels.reference.sampling.philox import gumbel_noise
from specserve_kernels.reference.sampling.sampling import add_bias, penalize, perturb, truncate
from torch import Tensor

triton = pytest.importorskip("triton")
from specserve_kernels.ops.sampling import sampling as ops  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEVER, FOREVER = -math.inf, 2**62
# NumPy, which the interpreter computes with, warns of infinities in lanes that are masked afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@dataclass
class Table:
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    seed: Tensor
    choice: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    bias_until: Tensor
    bias_count: Tensor
    counts: Tensor
    in_prompt: Tensor


@dataclass
class Batch:
    logits: Tensor
    rows: Tensor
    position: Tensor
    path: Tensor | None
    table: Table


def blank_table(rows: int, vocab: int, entries: int = 100) -> Table:
    def integers(*shape: int) -> Tensor:
        return torch.zeros(rows, *shape, dtype=torch.int64)

    generator = torch.Generator().manual_seed(rows)
    return Table(
        temperature=torch.zeros(rows),
        top_k=integers(),
        top_p=torch.ones(rows),
        min_p=torch.zeros(rows),
        repetition=torch.ones(rows),
        frequency=torch.zeros(rows),
        presence=torch.zeros(rows),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        choice=torch.arange(rows) % 3,
        bias_ids=integers(entries) + vocab,
        bias_values=torch.full((rows, entries), math.nan),  # what is not in use is not read
        bias_until=integers(entries) + FOREVER,
        bias_count=integers(),
        counts=torch.randint(0, 4, (rows, vocab), generator=generator, dtype=torch.int32).clamp(min=2) - 2,
        in_prompt=torch.rand(rows, vocab, generator=generator) < 0.1,
    )


def fill(table: Table, row: int, rng: random.Random, vocab: int, features: set[str], best: list[int]) -> None:
    """Draws parameters for the features named; ``best``: tokens worth a bias."""
    if "noise" in features:
        table.temperature[row] = rng.choice([0.3, 1.0, 1.7])
    if "top_k" in features:
        table.top_k[row] = rng.choice([1, 2, 7, 50, vocab, 10**9])
    if "top_p" in features:
        table.top_p[row] = rng.choice([1e-9, 0.1, 0.5, 0.9, 0.99])
    if "min_p" in features:
        table.min_p[row] = rng.choice([1e-4, 0.05, 0.3, 1.0])
    if "penalties" in features:
        table.repetition[row] = rng.choice([1.0, 1.3, 0.7])
        table.frequency[row] = rng.choice([0.5, -1.0])
        table.presence[row] = rng.choice([0.0, 0.8, -2.0])
    if "bias" in features:
        entries = [(token, rng.uniform(-5, 5), FOREVER) for token in rng.sample(best, 8) * 2]
        entries += [(rng.randrange(vocab), 1.0, FOREVER) for _ in range(50)]
        entries += [(token, NEVER, rng.choice([5, 50])) for token in rng.sample(best, 4)]
        entries += [(vocab, NEVER, FOREVER)]
        table.bias_count[row] = len(entries)
        for column, values in enumerate(zip(*entries, strict=True)):
            named = (table.bias_ids, table.bias_values, table.bias_until)[column]
            named[row, : len(entries)] = torch.tensor(values, dtype=named.dtype)


FEATURES = ["noise", "top_k", "top_p", "min_p", "penalties", "bias"]
ALONE: list[set[str]] = [set(), {"noise"}, {"penalties"}, {"bias"}]
ALONE += [{"noise", name} for name in ("top_k", "top_p", "min_p")]
ALONE += [{"noise", "top_k", "top_p"}, set(FEATURES)]


def make_batch(seed: int, vocab: int, width: int, features: list[set[str]], path: int) -> Batch:
    """One row of the table for each set of features, two nodes a row; ``width``: of the logits."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    table = blank_table(len(features), vocab)
    rows = torch.arange(len(features)).repeat(2)[torch.randperm(2 * len(features), generator=generator)]
    logits = torch.randn(len(rows), width, generator=generator) * 3
    logits[1::3] = logits[1::3].round()  # ties
    logits[2::5, : width // 2] = 1.5
    for row, named in enumerate(features):
        node = int((rows == row).nonzero()[0])
        best = logits[node].topk(min(width, 16)).indices.tolist()
        fill(table, row, rng, vocab, named, best)
    tokens = torch.randint(0, vocab + 1, (len(rows), path), generator=generator)
    tokens[:, path // 2 :] = vocab
    tokens[:, : path // 4] = logits.argmax(-1)[:, None]
    position = torch.randint(0, 40, (len(rows),), generator=generator)
    return Batch(logits, rows, position, tokens if path else None, table)


def expected_scores(batch: Batch, vocab: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """What ``engine.sampler`` computes, in the reference's functions."""
    table, rows = batch.table, batch.rows
    counts, in_prompt = table.counts[rows], table.in_prompt[rows]
    size = counts.shape[1]
    if batch.path is not None:
        padded = torch.nn.functional.pad(counts, (0, 1))
        counts = padded.scatter_add_(1, batch.path, torch.ones_like(batch.path, dtype=torch.int32))[:, :-1]
    noise = gumbel_noise(
        table.seed[rows], table.choice[rows], batch.position[:, None] + 1, size, torch.float32
    )[:, 0]
    used = torch.arange(table.bias_ids.shape[1]) < table.bias_count[:, None]
    ids, values = table.bias_ids, table.bias_values.masked_fill(~used, 0)
    if vocab is not None:
        counts, in_prompt, noise = counts[:, vocab[0]], in_prompt[:, vocab[0]], noise[:, vocab[0]]
        ids = vocab[1][ids]
    found = penalize(
        batch.logits.float(),
        counts,
        in_prompt | (counts > 0),
        table.repetition[rows],
        table.frequency[rows],
        table.presence[rows],
    )
    found = add_bias(found, ids[rows], values[rows], table.bias_until[rows], batch.position + 1)
    found = truncate(found, table.temperature[rows], table.top_k[rows], table.top_p[rows], table.min_p[rows])
    return perturb(found, noise, table.temperature[rows])


def as_bf16(batch: Batch) -> Batch:
    return replace(batch, logits=batch.logits.bfloat16())


def on_device(batch: Batch) -> Batch:
    table = Table(*(getattr(batch.table, field.name).to(DEVICE) for field in fields(Table)))
    path = None if batch.path is None else batch.path.to(DEVICE)
    return Batch(batch.logits.to(DEVICE), batch.rows.to(DEVICE), batch.position.to(DEVICE), path, table)


def assert_chosen(batch: Batch) -> None:
    scores = expected_scores(batch)
    there = on_device(batch)
    found = ops.choose_tokens(there.logits, there.rows, there.position, there.path, there.table).cpu()
    best = scores.topk(2).values
    clear = (best[:, 0] - best[:, 1] > 1e-4) | (batch.table.temperature[batch.rows] == 0)
    assert clear.float().mean() > 0.7
    assert torch.equal(found[clear], scores.argmax(-1)[clear])
    assert bool((scores.gather(1, found[:, None])[:, 0] > best[:, 0] - 2e-4).all())


def assert_candidates(batch: Batch, branching: int, vocab: tuple[Tensor, Tensor] | None = None) -> None:
    scores = expected_scores(batch, vocab)
    there = on_device(batch)
    maps = () if vocab is None else (vocab[0].to(DEVICE), vocab[1].to(DEVICE))
    tokens, values = ops.draft_candidates(
        there.logits, there.rows, there.position, there.path, there.table, branching, *maps
    )
    best = scores.sort(dim=-1, descending=True, stable=True)
    ids = best.indices if vocab is None else vocab[0][best.indices]
    wanted = best.values - scores.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(values.cpu(), wanted[:, :branching], rtol=1e-4, atol=2e-4)
    padded = torch.nn.functional.pad(best.values, (1, 1), value=math.nan)
    near = padded.diff(dim=-1).abs() < 1e-4  # equal infinities differ by nan
    near = (near[:, :-1] | near[:, 1:])[:, :branching] & (batch.table.temperature[batch.rows, None] > 0)
    assert near.float().mean() < 0.3
    assert torch.equal(tokens.cpu()[~near], ids[:, :branching][~near])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "BLOCK", 64)
    monkeypatch.setattr(ops, "COLLECTED", 32)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("features", ALONE, ids=lambda names: "+".join(sorted(names)) or "greedy")
def test_a_feature_alone(features: set[str]) -> None:
    batch = make_batch(len(features), 170, 170, [features] * 2, path=4)
    assert_chosen(batch)
    assert_candidates(batch, 4)


@pytest.mark.usefixtures("small_blocks")
def test_a_penalty_alone() -> None:
    """Each moves the choice of a greedy row, which takes its largest logit as it is without any."""
    table = blank_table(4, 170)
    table.counts.zero_()
    table.in_prompt.zero_()
    table.counts[:, 100] = 2
    table.repetition[1], table.frequency[2], table.presence[3] = 2, 1, 1
    logits = torch.zeros(4, 170)
    logits[:, 100], logits[:, 140] = 1.0, 0.9
    batch = Batch(logits, torch.arange(4), torch.arange(4), None, table)
    assert expected_scores(batch).argmax(-1).tolist() == [100, 140, 140, 140]
    assert_chosen(batch)


@pytest.mark.usefixtures("small_blocks")
def test_mixed_rows() -> None:
    batch = make_batch(5, 170, 170, ALONE, path=4)
    assert_chosen(batch)
    assert_candidates(batch, 5)


def test_many_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 15 blocks fill all rows that a merge has, and those of a block are ranked row by row."""
    monkeypatch.setattr(ops, "BLOCK", 16)
    batch = make_batch(3, 230, 230, [set(), {"noise"}, {"noise", "top_k"}], path=0)
    assert_candidates(batch, 20)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("branching", [1, 8])
def test_mapped_vocabulary(branching: int) -> None:
    """The draft's columns are target tokens in any order; bias entries outside it are holes."""
    target, width = 500, 150
    ids = torch.randperm(target, generator=torch.Generator().manual_seed(0))[:width]
    inverse = torch.full((target + 1,), width)
    inverse[ids] = torch.arange(width)
    batch = make_batch(branching, target, width, ALONE, path=4)
    batch.table.bias_ids[:, :40:2] = ids[:20]
    assert_candidates(batch, branching, (ids, inverse))


def test_several_blocks_of_an_odd_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "BLOCK", 1024)
    monkeypatch.setattr(ops, "COLLECTED", 256)
    batch = make_batch(7, 2049, 2049, ALONE[-5:], path=2)
    assert_chosen(batch)
    assert_candidates(batch, 4)


@pytest.mark.usefixtures("small_blocks")
def test_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all tokens as candidates, those cut off are the ones at -inf: exactly what ``truncate`` cuts."""
    monkeypatch.setattr(ops, "BLOCK", 16)
    monkeypatch.setattr(ops, "COLLECTED", 8)
    rng, generator, vocab, count = random.Random(0), torch.Generator().manual_seed(0), 40, 20
    logits = torch.randn(count, vocab, generator=generator) * 3
    logits[::3] = (logits[::3] * 2).round() / 2
    logits[1::6] = 1.5
    logits[2::5, ::2] = NEVER
    logits[4] *= 1e6  # beyond the edges' range
    logits[5] *= 30  # most tokens lie below all edges
    table = blank_table(count, vocab)
    for row in range(count):
        table.temperature[row] = rng.choice([0.0, 0.3, 1.0, 1.7])
        table.top_k[row] = rng.choice([-1, 0, 1, 2, 5, 20, vocab - 1, vocab, vocab + 1])
        table.top_p[row] = rng.choice([1e-9, 0.1, 0.5, 0.9, 0.99, 1.0])
        table.min_p[row] = rng.choice([0.0, 0.0, 0.01, 0.2, 1.0])
    batch = on_device(Batch(logits, torch.arange(count), torch.arange(count), None, table))
    tokens, values = ops.draft_candidates(batch.logits, batch.rows, batch.position, None, batch.table, vocab)
    kept = torch.zeros(count, vocab, dtype=torch.bool).scatter_(1, tokens.cpu(), values.cpu() > NEVER)
    wanted = truncate(logits, table.temperature, table.top_k, table.top_p, table.min_p) > NEVER
    assert torch.equal(kept, wanted)


def test_ties_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "BLOCK", 16)
    logits = torch.full((3, 50), -1.0)
    logits[0, [40, 33, 7]] = 2.0
    logits[1] = NEVER
    logits[2] = torch.where(torch.arange(50) % 2 == 0, -0.0, 0.0)
    batch = on_device(
        Batch(logits, torch.zeros(3, dtype=torch.int64), torch.arange(3), None, blank_table(1, 50))
    )
    found = ops.choose_tokens(batch.logits, batch.rows, batch.position, None, batch.table)
    assert found.tolist() == [7, 0, 0]
    tokens, _ = ops.draft_candidates(
        batch.logits[::2].contiguous(), batch.rows[:2], batch.position[:2], None, batch.table, 4
    )
    assert tokens.tolist() == [[7, 33, 40, 0], [0, 1, 2, 3]]


def test_a_node_does_not_depend_on_its_batch() -> None:
    batch = on_device(make_batch(3, 300, 300, ALONE, path=4))
    all_tokens, all_values = ops.draft_candidates(
        batch.logits, batch.rows, batch.position, batch.path, batch.table, 3
    )
    assert batch.path is not None
    for n in range(0, len(batch.rows), 4):
        one = slice(n, n + 1)
        tokens, values = ops.draft_candidates(
            batch.logits[one], batch.rows[one], batch.position[one], batch.path[one], batch.table, 3
        )
        assert torch.equal(tokens, all_tokens[one])
        assert torch.equal(values, all_values[one])


KINDS = 7  # of logits: finite, one +inf, two, one NaN, a block of NaN, all NaN, all -inf
# Temperature, top-k, top-p, min-p, repetition: the first for every kind of logits, the others for the first two.
USUAL = [(0.0, 0, 1.0, 0.0, 1.0), (1.0, 0, 0.9, 0.0, 1.0), (1.0, 43, 0.9, 0.1, 1.0)]
FAR_OUT = [(1.0, 5, 1e-30, 0.0, 1.0), (2e-38, 0, 0.9, 0.0, 1.0), (1e-45, 3, 0.5, 1.0, 1.0)]
FAR_OUT += [(3e38, 0, 0.9, 0.0, 1.0), (math.inf, 9, 0.9, 0.5, 1.0)]
FAR_OUT += [(1.0, 0, 0.9, 0.0, 1e-38), (1.0, 2, 1.0, 0.0, 1e-45), (0.7, 0, 0.9, 0.0, 3e38)]


def extreme_batch(vocab: int) -> tuple[Batch, Tensor]:
    """Logits that are not finite and parameters as far out as float32 goes; and the kind of each row."""
    kinds = [torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 3 for _ in range(KINDS)]
    for row in kinds[1:]:
        row.copy_(kinds[0])
    kinds[1][7] = math.inf
    kinds[2][[9, 30]] = math.inf
    kinds[3][5] = math.nan
    kinds[4][16:32] = math.nan
    kinds[5][:] = math.nan
    kinds[6][:] = NEVER
    table = blank_table(len(USUAL) + len(FAR_OUT), vocab, 4)
    table.counts.zero_()
    table.in_prompt[:] = torch.arange(vocab) % 13 == 7
    named = table.temperature, table.top_k, table.top_p, table.min_p, table.repetition
    for column, values in zip(named, zip(*USUAL, *FAR_OUT, strict=True), strict=True):
        column.copy_(torch.tensor(values))
    cases = [(r, kind) for r in range(len(table.top_k)) for kind in range(KINDS if r < len(USUAL) else 2)]
    rows, kind = torch.tensor(cases).T.contiguous()
    return Batch(torch.stack(kinds)[kind], rows, torch.zeros_like(rows) + 3, None, table), kind


@pytest.mark.parametrize(("mapped", "branching"), [(False, 4), (True, 1)])
def test_not_finite(mapped: bool, branching: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, with ids of the vocabulary; values are never NaN, and where all is finite they are the reference's."""
    faulthandler.dump_traceback_later(120, exit=True)  # nothing else ends a kernel that does not
    monkeypatch.setattr(ops, "BLOCK", 16)
    monkeypatch.setattr(ops, "COLLECTED", 8)
    vocab = 40
    batch, kind = extreme_batch(vocab)
    there = on_device(batch)
    given = (there.rows, there.position, None, there.table)
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))
    inverse = torch.cat([ids.argsort(), torch.tensor([vocab])])
    maps = (ids.to(DEVICE), inverse.to(DEVICE)) if mapped else ()
    tokens, values = (x.cpu() for x in ops.draft_candidates(there.logits, *given, branching, *maps))
    chosen = None if mapped else ops.choose_tokens(there.logits, *given).cpu()
    faulthandler.cancel_dump_traceback_later()
    assert bool(((tokens >= 0) & (tokens < vocab)).all())
    assert not values.isnan().any()
    assert bool((tokens.sort(-1).values.diff(dim=-1) > 0).all()), "all of a row differ"
    nothing = kind >= 5
    assert bool((values[nothing] == NEVER).all())
    clean = replace(batch, logits=batch.logits.nan_to_num(NEVER, math.inf, NEVER))
    scores = expected_scores(clean, (ids, inverse) if mapped else None)
    best = scores.topk(2).values
    clear = best[:, 0].isfinite() & (best[:, 0] - best[:, 1] > 1e-4 * best[:, 0].abs().clamp(min=1))
    clear &= ~scores.isnan().any(-1)
    assert int(clear.sum()) > 12
    wanted = scores.argmax(-1)
    assert torch.equal(tokens[clear, 0], ids[wanted][clear] if mapped else wanted[clear])
    top = (scores - scores.logsumexp(-1, keepdim=True)).amax(-1)
    torch.testing.assert_close(values[clear, 0], top[clear], rtol=1e-4, atol=2e-4)
    if chosen is not None:
        assert bool(((chosen >= 0) & (chosen < vocab)).all())
        assert not chosen[nothing].any()
        usual = batch.table.repetition[batch.rows] == 1
        assert bool((chosen[usual & (kind == 1)] == 7).all())
        assert bool((chosen[usual & (kind == 2)] == 9).all())
        assert torch.equal(chosen[clear], wanted[clear])


def test_arguments_are_checked() -> None:
    batch = make_batch(0, 64, 64, [set()], path=0)
    given = (batch.rows, batch.position, None, batch.table)
    with pytest.raises(ValueError, match="branching"):
        ops.draft_candidates(batch.logits, *given, 65)
    with pytest.raises(ValueError, match="inverse_V"):
        ops.draft_candidates(batch.logits, *given, 1, batch.rows)
    with pytest.raises(ValueError, match="float64"):
        ops.choose_tokens(batch.logits.double(), *given)
    with pytest.raises(ValueError, match="contiguous"):
        ops.choose_tokens(batch.logits.T.contiguous().T, *given)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
class TestOnGpu:
    """The sizes served, which the interpreter is too slow for."""

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_large_vocabulary(self, seed: int, dtype: torch.dtype) -> None:
        batch = make_batch(seed, 128256, 128256, ALONE * 2, path=6)
        assert_chosen(replace(batch, logits=batch.logits.to(dtype)))

    @pytest.mark.parametrize("branching", [1, 4, 8, 64])
    def test_draft_vocabulary(self, branching: int) -> None:
        target, width = 128256, 32000
        ids = torch.randperm(target, generator=torch.Generator().manual_seed(0))[:width].sort().values
        inverse = torch.full((target + 1,), width)
        inverse[ids] = torch.arange(width)
        batch = make_batch(branching, target, width, ALONE, path=6)
        batch.table.bias_ids[:, :40:2] = ids[:20]
        assert_candidates(as_bf16(batch), branching, (ids, inverse))
        assert_candidates(as_bf16(make_batch(branching, width, width, ALONE, path=6)), branching)

    @pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 3.0])
    def test_flat_logits(self, spread: float) -> None:
        """Thresholds with far more tokens around them than are collected at a time."""
        vocab, count = 65537, 12
        table = blank_table(count, vocab)
        table.temperature += torch.tensor([1.0, 0.7, 1.4]).repeat(4)
        table.top_p[:8] = torch.tensor([0.05, 0.5, 0.9, 0.99]).repeat(2)
        table.top_k[4:] = torch.tensor([1000, 20000, 50000, 65536]).repeat(2)
        logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(1)) * spread
        batch = Batch(logits, torch.arange(count), torch.arange(count), None, table)
        for each in (batch, as_bf16(batch)):
            assert_chosen(each)
            assert_candidates(each, 4)

    def test_one_graph_serves_all(self) -> None:
        """The table changes between replays; nothing is read by the host."""
        batch = on_device(as_bf16(make_batch(0, 5000, 5000, [set()] * len(ALONE), path=4)))
        given = (batch.logits, batch.rows, batch.position, batch.path, batch.table)
        ops.choose_tokens(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = ops.choose_tokens(*given)
        other = on_device(as_bf16(make_batch(1, 5000, 5000, ALONE, path=4)))
        for field in fields(Table):
            getattr(batch.table, field.name).copy_(getattr(other.table, field.name))
        for name in ("logits", "rows", "position", "path"):
            getattr(batch, name).copy_(getattr(other, name))
        graph.replay()
        assert torch.equal(
            found, ops.choose_tokens(other.logits, other.rows, other.position, other.path, other.table)
        )
