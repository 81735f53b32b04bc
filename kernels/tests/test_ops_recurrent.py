"""The gated delta rule in lagged blocks: equal to the recurrence, and the same bits whatever the passes. The reference,
and the kernel on a CPU under Triton's interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from specserve_kernels.reference.recurrent import delta_rule as reference
from specserve_kernels.reference.recurrent.delta_rule import (
    DeltaInputs,
    Lagged,
    Runs,
    decays,
    keep_last,
    lag,
    trace_back,
)
from torch import Tensor

pytest.importorskip("triton")
from specserve_kernels.ops.recurrent import delta_rule as ops

ROWS = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Dtypes = tuple[torch.dtype, torch.dtype]  # of states and of entries


@dataclass(frozen=True)
class Sizes:
    block: int
    keys: int
    values: int
    key: int
    value: int


SMALL = Sizes(4, 2, 4, 6, 5)
INTERPRETED = Sizes(16, 1, 2, 16, 8)
WHOLE = Sizes(16, 2, 4, 128, 128)


class Layer:
    """One layer's kept tensors, at first with NaN in all that nothing may read, and passes over its rows."""

    def __init__(self, rule: ModuleType, sizes: Sizes, dtypes: Dtypes, kept: Lagged | None = None) -> None:
        self.rule, self.sizes, (self.state, self.entry) = rule, sizes, dtypes
        self.wide, self.device = (
            torch.promote_types(self.state, torch.float32),
            DEVICE if rule is ops else "cpu",
        )
        entries, heads = 2 * sizes.block, (sizes.values, sizes.value)

        def unread(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((ROWS, *shape), torch.nan, dtype=dtype, device=self.device)

        self.kept = kept or Lagged(
            unread(self.state, sizes.values, sizes.key, sizes.value),
            unread(self.entry, entries, sizes.keys, sizes.key),
            unread(self.entry, entries, *heads),
            unread(self.wide, entries, sizes.values),
        )

    def copy(self) -> Layer:
        kept = Lagged(*(table.clone() for table in self.kept))
        return Layer(self.rule, self.sizes, (self.state, self.entry), kept)

    def draw(self, count: int) -> DeltaInputs:
        sizes, unit = self.sizes, torch.nn.functional.normalize
        query, key = (unit(torch.randn(count, sizes.keys, sizes.key), dim=-1) for _ in range(2))
        value, beta = torch.randn(count, sizes.values, sizes.value), torch.rand(count, sizes.values)
        numbers = query.to(self.entry), key.to(self.entry), value.to(self.entry), beta.to(self.wide)
        decay = -torch.rand(count, sizes.values).to(self.wide) / 2
        return DeltaInputs(*(each.to(self.device) for each in (*numbers, decay)))

    def same(self, other: Layer, row: int, length: int) -> bool:
        """Compare what is read of a row after so many tokens."""
        begin = int(lag(torch.tensor(length), self.sizes.block))
        held = [position % (2 * self.sizes.block) for position in range(begin, length)]
        (one, two), *rest = zip(self.kept, other.kept, strict=True)
        states = begin == 0 or torch.equal(one[row], two[row])
        return states and all(torch.equal(one[row, held], two[row, held]) for one, two in rest)

    def runs(self, rows: list[int], lengths: list[int], counts: list[int], parents: list[int] | None) -> Runs:
        """``parents``: of a single run's nodes, -1 of its root; None: all are chains."""
        starts = torch.tensor([0, *counts]).cumsum(0)
        local = torch.cat([torch.arange(count) for count in counts])
        slot, span = torch.repeat_interleave(torch.arange(len(rows)), starts.diff()), 2 * self.sizes.block
        packed = None if parents is None else torch.tensor(parents).clamp(min=0)
        back = trace_back(packed, local, self.sizes.block - 1, span)
        depth = local if parents is None else (back >= 0).sum(1) - 1
        row, length = torch.tensor(rows), torch.tensor(lengths)
        tensors = row, length, starts, row[slot], length[slot] + depth, back
        return Runs(*(each.to(self.device) for each in tensors), max(counts))

    def prompts(self, inputs: list[DeltaInputs], rows: list[int], lengths: list[int]) -> list[Tensor]:
        counts, packed = [len(each.key_TJD) for each in inputs], joined(*inputs)
        runs = self.runs(rows, lengths, counts, None)
        decay = decays(packed.decay_TV, self.kept.decay_REV, runs)
        out, made = self.rule.delta_prompts(packed, decay, self.kept, runs)
        ends = torch.repeat_interleave(runs.length_B + runs.q_start.diff(), runs.q_start.diff())
        index = torch.arange(len(ends), device=self.device)
        self.keep(packed, made, index, runs.rows_T, runs.position_T, ends)
        return list(out.split(counts))

    def prompt(self, inputs: DeltaInputs, length: int) -> Tensor:
        return self.prompts([inputs], [1], [length])[0]

    def keep(self, inputs: DeltaInputs, made: Tensor, *where: Tensor) -> None:
        for table, source in zip(self.kept[1:], (inputs.key_TJD, made, inputs.decay_TV), strict=True):
            keep_last(table[None], source[None], *where)

    def step(
        self, inputs: DeltaInputs, length: int, path: list[int], parents: list[int] | None = None
    ) -> Tensor:
        """Verify nodes, and commit those on a path."""
        runs = self.runs([1], [length], [len(inputs.key_TJD)], parents)
        decay = decays(inputs.decay_TV, self.kept.decay_REV, runs)
        out, made = self.rule.delta_nodes(inputs, decay, self.kept, runs)
        index, count = torch.tensor(path, device=self.device), torch.tensor([len(path)], device=self.device)
        stacked = Lagged(*(table[None] for table in self.kept))
        self.rule.fold_states(stacked, runs.rows_B, runs.length_B, count)
        places = length + torch.arange(len(path), device=self.device)
        self.keep(inputs, made, index, runs.rows_B.expand(len(path)), places, length + count)
        return out[index]


def part(inputs: DeltaInputs, first: int, last: int) -> DeltaInputs:
    return DeltaInputs(*(each[first:last] for each in inputs))


def joined(*parts: DeltaInputs) -> DeltaInputs:
    return DeltaInputs(*map(torch.cat, zip(*parts, strict=True)))


def recurrence(inputs: DeltaInputs) -> Tensor:
    query, key, value, beta, decay = (each.cpu().double() for each in inputs)
    _, heads, size = value.shape
    state, out = torch.zeros(heads, key.shape[2], size, dtype=torch.float64), []
    for token in range(len(key)):
        q, k = (each[token].repeat_interleave(heads // key.shape[1], 0)[..., None] for each in (query, key))
        state = decay[token].exp()[:, None, None] * state
        correction = beta[token][:, None] * (value[token] - (state * k).sum(1))
        state = state + k * correction[:, None]
        out.append((state * q).sum(1))
    return torch.stack(out)


def check_passes(layer: Layer, tokens: int, begin: int, chunks: list[int], trees: int, nodes: int) -> float:
    """Compare bits of tokens one by one from ``begin`` on, in chunks, and as nodes of trees across borders of blocks,
    committed. Return the largest error against the recurrence."""
    block = layer.sizes.block
    inputs = layer.draw(tokens)
    inputs.decay_TV[block + 3] = -torch.inf
    outs, at = [layer.prompt(part(inputs, 0, begin), 0)] if begin else [], {begin: layer}
    for position in range(begin, tokens):
        at[position] = layer.copy()
        outs.append(layer.step(part(inputs, position, position + 1), position, [0]))
    at[tokens] = layer
    plain = torch.cat(outs)
    for size in chunks:
        first = begin if begin % size else 0
        chunked = at[first].copy() if first else Layer(layer.rule, layer.sizes, (layer.state, layer.entry))
        for start in range(first, tokens, size):
            end = min(start + size, tokens)
            out = chunked.prompt(part(inputs, start, end), start)
            assert torch.equal(out, plain[start:end]), (size, start)
            assert end not in at or chunked.same(at[end], 1, end)
    for _ in range(trees):
        length = int(torch.randint(begin, tokens - block, ()))
        true = int(torch.randint(1, block + 1, ()))
        parents, depth, path = [-1], [0], [0]
        while len(path) < true or len(parents) < nodes:
            on_path = len(path) < true and bool(torch.randint(2, ()))
            parent = path[-1] if on_path else int(torch.randint(len(parents), ()))
            if depth[parent] + 1 < block:
                path += [len(parents)] if on_path else []
                parents.append(parent)
                depth.append(depth[parent] + 1)
        drawn, grown = layer.draw(len(parents)), at[length].copy()
        for own, given in zip(drawn, part(inputs, length, length + true), strict=True):
            own[path] = given
        assert torch.equal(grown.step(drawn, length, path, parents), plain[length : length + true])
        assert grown.same(at[length + true], 1, length + true), (length, true)
    return float((plain.cpu().double() - recurrence(inputs)).abs().max() / plain.abs().max())


@pytest.mark.parametrize(
    ("state", "entry", "tolerance", "trees"),
    [
        (torch.float64, torch.float64, 1e-12, 100),
        (torch.float32, torch.float32, 1e-5, 20),
        (torch.float32, torch.bfloat16, 2e-2, 20),
        (torch.bfloat16, torch.bfloat16, 4e-2, 20),
    ],
)
def test_reference(state: torch.dtype, entry: torch.dtype, tolerance: float, trees: int) -> None:
    torch.manual_seed(0)
    layer = Layer(reference, SMALL, (state, entry))
    assert check_passes(layer, 30, 0, [3, 7, 30], trees, nodes=12) < tolerance


@pytest.mark.parametrize(
    ("state", "begin", "tolerance"), [(torch.float32, 30, 1e-5), (torch.bfloat16, 34, 2e-2)]
)
def test_kernel(state: torch.dtype, begin: int, tolerance: float) -> None:
    """Across borders at which states are folded: 32 and 48."""
    torch.manual_seed(0)
    layer = Layer(ops, INTERPRETED, (state, torch.float32))
    assert check_passes(layer, 51, begin, [30], trees=2, nodes=20) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entry", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [16, 32])
def test_kernel_on_a_gpu(state: torch.dtype, entry: torch.dtype, block: int) -> None:
    """One row against sixteen, trees against chains, folds within a verification against those at commit."""
    torch.manual_seed(0)
    sizes = Sizes(block, WHOLE.keys, WHOLE.values, WHOLE.key, WHOLE.value)
    layer = Layer(ops, sizes, (state, entry))
    wide = {torch.float32, state, entry} == {torch.float32}
    assert check_passes(layer, 300, 0, [1, 16, 17, 64, 100, 300], trees=300, nodes=64) < (
        1e-5 if wide else 5e-2
    )


@pytest.mark.parametrize(("rule", "sizes"), [(reference, SMALL), (ops, INTERPRETED)])
def test_runs_of_several_rows(rule: ModuleType, sizes: Sizes) -> None:
    """Together they have the bits that each has alone, next to an empty run of padding."""
    torch.manual_seed(1)
    alone, both = (Layer(rule, sizes, (torch.float32, torch.float32)) for _ in range(2))
    first, second = alone.draw(sizes.block * 2 + 3), alone.draw(6)
    expected = [alone.prompts([first], [0], [0])[0], alone.prompt(second, 0)]
    begun = both.prompts([part(first, 0, 9)], [0], [0])[0]
    rest, other, _ = both.prompts([part(first, 9, 99), second, part(second, 0, 0)], [0, 1, 2], [9, 0, 1])
    assert torch.equal(torch.cat([begun, rest]), expected[0])
    assert torch.equal(other, expected[1])
    assert both.same(alone, 0, len(first.key_TJD))
    assert both.same(alone, 1, 6)
