"""The gated delta rule in lagged blocks: equal to the recurrence, and the same bits whatever the passes. The reference,
and the kernel on a CPU under Triton's interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from specserve_kernels.reference.recurrent import delta_rule, inputs
from specserve_kernels.reference.recurrent.delta_rule import (
    Lagged,
    Left,
    Runs,
    lag,
)
from torch import Tensor
from torch.nn import functional as F

from kernels.tests.gluon import on_cpu
from tests.bounds import OutOfBounds

pytest.importorskip("triton")
from specserve_kernels.ops.recurrent import delta_rule as delta_rule_ops
from specserve_kernels.ops.recurrent import delta_steps as delta_steps_ops
from specserve_kernels.ops.recurrent import inputs as inputs_ops

reference, ops = (
    SimpleNamespace(**vars(rule) | vars(tokens))
    for rule, tokens in ((delta_rule, inputs), (delta_rule_ops, inputs_ops))
)
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


class Drawn(NamedTuple):
    """What projections give: inputs of the convolution, of correction and of decay."""

    x_TC: Tensor
    b_TV: Tensor
    a_TV: Tensor


TAPS, PAGE = 4, 4
SMALL = Sizes(4, 2, 4, 6, 5)
INTERPRETED = Sizes(16, 1, 2, 16, 8)
WHOLE = Sizes(32, 2, 4, 128, 128)


class Layer:
    """One layer's weights and kept tensors, at first with NaN in all that nothing may read, and passes over its
    rows."""

    def __init__(self, rule: Any, sizes: Sizes, dtypes: Dtypes) -> None:
        self.rule, self.sizes, (self.state, self.entry) = rule, sizes, dtypes
        self.wide, self.device = (
            torch.promote_types(self.state, torch.float32),
            DEVICE if rule is ops else "cpu",
        )
        entries, heads = 2 * sizes.block, (sizes.values, sizes.value)
        self.channels = 2 * sizes.keys * sizes.key + sizes.values * sizes.value

        def unread(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((ROWS, *shape), torch.nan, dtype=dtype, device=self.device)

        self.kept = Lagged(
            unread(self.state, sizes.values, sizes.key, sizes.value),
            unread(self.entry, entries, sizes.keys, sizes.key),
            unread(self.entry, entries, *heads),
            unread(self.wide, entries, sizes.values),
        )
        self.inputs_RWC = unread(self.entry, 2 * (TAPS - 1), self.channels)
        drawn = torch.randn(self.channels, TAPS), torch.randn(sizes.values), torch.rand(sizes.values) - 2
        self.weight_CK, self.rate_V, self.bias_V = (
            each.to(dtype).to(self.device)
            for each, dtype in zip(drawn, (self.entry, self.wide, self.wide), strict=True)
        )

    def copy(self, fresh: bool = False) -> Layer:
        """``fresh``: with no tokens."""
        made = Layer(self.rule, self.sizes, (self.state, self.entry))
        made.weight_CK, made.rate_V, made.bias_V = self.weight_CK, self.rate_V, self.bias_V
        if not fresh:
            made.kept = Lagged(*(table.clone() for table in self.kept))
            made.inputs_RWC = self.inputs_RWC.clone()
        return made

    def draw(self, count: int) -> Drawn:
        """As views of what two projections give."""
        wide = torch.randn(count, self.channels + 3), torch.randn(count, 2 * self.sizes.values)
        many_TX, few_TX = (each.to(self.entry).to(self.device) for each in wide)
        return Drawn(many_TX[:, : self.channels], *few_TX.chunk(2, -1))

    def same(self, other: Layer, row: int, length: int) -> bool:
        """Compare what is read of a row after so many tokens."""
        begin = int(lag(torch.tensor(length), self.sizes.block))
        held = [position % (2 * self.sizes.block) for position in range(begin, length)]
        page = length // PAGE * PAGE
        read = {position for end in (length, page) for position in range(max(end - TAPS + 1, 0), end)}
        last = inputs.place(torch.tensor(sorted(read)), TAPS - 1, PAGE)
        (one, two), *rest = zip(self.kept, other.kept, strict=True)
        states = begin == 0 or torch.equal(one[row], two[row])
        same = torch.equal(self.inputs_RWC[row, last], other.inputs_RWC[row, last])
        return states and same and all(torch.equal(one[row, held], two[row, held]) for one, two in rest)

    def runs(self, rows: list[int], lengths: list[int], counts: list[int], parents: list[int] | None) -> Runs:
        """``parents``: of a single run's nodes, -1 of its root; None: all are chains."""
        starts = torch.tensor([0, *counts]).cumsum(0)
        local = torch.cat([torch.arange(count) for count in counts])
        slot, span = torch.repeat_interleave(torch.arange(len(rows)), starts.diff()), 2 * self.sizes.block
        packed = None if parents is None else torch.tensor(parents, device=self.device).clamp(min=0)
        back = self.rule.trace_back(packed, local.to(self.device), self.sizes.block - 1, span).cpu()
        depth = local if parents is None else (back >= 0).sum(1) - 1
        row, length = torch.tensor(rows), torch.tensor(lengths)
        tensors = row, length, starts, row[slot], length[slot] + depth, back
        return Runs(*(each.to(self.device) for each in tensors), max(counts), PAGE)

    def run(self, drawn: Drawn, runs: Runs, prompts: bool) -> tuple[Tensor, Left]:
        """Return outputs, and what the tokens leave."""
        count = len(drawn.x_TC)
        left = Left(
            *(table.new_empty(count, *table.shape[2:]) for table in (*self.kept[1:], self.inputs_RWC))
        )
        few = drawn.b_TV, drawn.a_TV, self.rate_V, self.bias_V
        tables = self.inputs_RWC, self.kept.decay_REV
        given = self.rule.delta_inputs(drawn.x_TC, self.weight_CK, *few, *tables, runs, left)
        rule = self.rule.delta_prompts if prompts else self.rule.delta_nodes
        return rule(given, self.kept, runs, left.value_TVU), left

    def prompts(self, drawn: list[Drawn], rows: list[int], lengths: list[int]) -> list[Tensor]:
        counts = [len(each.x_TC) for each in drawn]
        runs = self.runs(rows, lengths, counts, None)
        out, left = self.run(joined(*drawn), runs, prompts=True)
        ends = torch.repeat_interleave(runs.length_B + runs.q_start.diff(), runs.q_start.diff())
        index = torch.arange(len(ends), device=self.device)
        self.keep(left, index, runs.rows_T, runs.position_T, ends)
        return list(out.split(counts))

    def prompt(self, drawn: Drawn, length: int) -> Tensor:
        return self.prompts([drawn], [1], [length])[0]

    def keep(self, left: Left, *where: Tensor) -> None:
        tables = tuple(table[None] for table in (*self.kept[1:], self.inputs_RWC))
        self.rule.keep_last(tables, Left(*(each[None] for each in left)), PAGE, *where)

    def step(self, drawn: Drawn, length: int, path: list[int], parents: list[int] | None = None) -> Tensor:
        """Verify nodes, and commit those on a path."""
        count, true = len(drawn.x_TC), len(path)
        runs = self.runs([1], [length], [count], parents)
        out, left = self.run(drawn, runs, prompts=False)
        index, row, end = (torch.tensor(each, device=self.device) for each in (path, [1], [length + true]))
        stacked = Lagged(*(table[None] for table in self.kept))
        self.rule.fold_states(stacked, runs.rows_B, runs.length_B, end - length)
        places = F.pad(length + torch.arange(true, device=self.device), (0, count - true), value=-1)
        self.keep(left, F.pad(index, (0, count - true)), row.repeat(count), places, end.repeat(count))
        return out[index]


def part(drawn: Drawn, first: int, last: int) -> Drawn:
    return Drawn(*(each[first:last] for each in drawn))


def joined(*parts: Drawn) -> Drawn:
    return Drawn(*map(torch.cat, zip(*parts, strict=True)))


def recurrence(layer: Layer, drawn: Drawn) -> Tensor:
    """Compute it in float64, token by token, from what a convolution of torch returns."""
    x, b, a = (each.cpu().double() for each in drawn)
    weight, rate, bias = (each.cpu().double() for each in (layer.weight_CK, layer.rate_V, layer.bias_V))
    sizes, tokens = layer.sizes, len(x)
    mixed = F.silu(F.conv1d(F.pad(x.T, (TAPS - 1, 0)), weight[:, None], groups=layer.channels)).T
    keys = sizes.keys * sizes.key
    both = mixed[:, : 2 * keys].view(tokens, 2, -1, sizes.key)
    query, key = (both / (both.square().sum(-1, keepdim=True) + 1e-6).sqrt()).unbind(1)
    value = mixed[:, 2 * keys :].view(tokens, sizes.values, sizes.value)
    query, beta, decay = query * sizes.key**-0.5, b.sigmoid(), -rate.exp() * F.softplus(a + bias)
    state, out = torch.zeros(sizes.values, sizes.key, sizes.value, dtype=torch.float64), []
    for token in range(tokens):
        q, k = (
            each[token].repeat_interleave(sizes.values // sizes.keys, 0)[..., None] for each in (query, key)
        )
        state = decay[token].exp()[:, None, None] * state
        correction = beta[token][:, None] * (value[token] - (state * k).sum(1))
        state = state + k * correction[:, None]
        out.append((state * q).sum(1))
    return torch.stack(out)


def check_passes(layer: Layer, tokens: int, begin: int, chunks: list[int], trees: int, nodes: int) -> float:
    """Compare bits of tokens one by one from ``begin`` on, in chunks, and as nodes of trees across borders of blocks,
    committed: of few nodes and of at least ``nodes``. Return the largest error against the recurrence."""
    block = layer.sizes.block
    inputs = layer.draw(tokens)
    inputs.a_TV[block + 3] = torch.inf
    outs, at = [layer.prompt(part(inputs, 0, begin), 0)] if begin else [], {begin: layer}
    for position in range(begin, tokens):
        at[position] = layer.copy()
        outs.append(layer.step(part(inputs, position, position + 1), position, [0]))
    at[tokens] = layer
    plain = torch.cat(outs)
    for size in chunks:
        first = begin if begin % size else 0
        chunked = at[first].copy() if first else layer.copy(fresh=True)
        for start in range(first, tokens, size):
            end = min(start + size, tokens)
            out = chunked.prompt(part(inputs, start, end), start)
            assert torch.equal(out, plain[start:end]), (size, start)
            assert end not in at or chunked.same(at[end], 1, end)
    for number in range(trees):
        length = int(torch.randint(begin, tokens - block, ()))
        most, least = (4, 4) if number % 2 else (block, nodes)
        true = int(torch.randint(1, most + 1, ()))
        parents, depth, path = [-1], [0], [0]
        while len(path) < true or len(parents) < least:
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
    return float((plain.cpu().double() - recurrence(layer, inputs)).abs().max() / plain.abs().max())


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
    for sizes, tokens in ((SMALL, 30), (Sizes(16, 1, 2, 64, 64), 60)):  # these BLAS multiplies
        layer = Layer(reference, sizes, (state, entry))
        assert check_passes(layer, tokens, 0, [3, 7, 30], trees, nodes=12) < tolerance


@pytest.mark.skipif(DEVICE == "cuda", reason="it compiles as many kernels as the next")
@pytest.mark.parametrize(
    ("state", "begin", "tolerance"), [(torch.float32, 30, 1e-5), (torch.bfloat16, 34, 2e-2)]
)
def test_kernel(state: torch.dtype, begin: int, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across borders at which states are folded: 32 and 48. Programs that prepare prompts have several tokens."""
    torch.manual_seed(0)
    monkeypatch.setattr(inputs_ops, "FEW", 4)
    layer = Layer(ops, INTERPRETED, (state, torch.float32))
    assert check_passes(layer, 51, begin, [30], trees=2, nodes=20) < tolerance


@pytest.mark.skipif(DEVICE == "cuda", reason="its sizes are the interpreter's")
def test_nodes_of_several_requests() -> None:
    """As deep as a block, across two borders of groups each: the bits of the same tokens as prompts."""
    torch.manual_seed(0)
    layer = Layer(ops, replace(INTERPRETED, block=32), (torch.float32, torch.float32))
    rows, lengths, counts = [0, 1, 2], [46, 13, 95], [32, 30, 31]
    layer.prompts([layer.draw(length) for length in lengths], rows, [0, 0, 0])
    drawn = [layer.draw(count) for count in counts]
    found, _ = layer.run(joined(*drawn), layer.runs(rows, lengths, counts, None), prompts=False)
    assert torch.equal(found, torch.cat(layer.prompts(drawn, rows, lengths)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("state", "entry"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)  # each compiles seven to nine kernels
def test_kernel_on_a_gpu(state: torch.dtype, entry: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row against sixteen, trees against chains, folds within a verification against those at commit, the kernel of
    few nodes against that of all, programs of few requests against those of many."""
    torch.manual_seed(0)
    few = cycle((True, False, True))  # so that every second tree, of few nodes, is now one's, now the other's
    monkeypatch.setattr(inputs_ops, "FEW", 64)
    monkeypatch.setattr(delta_rule_ops, "takes", lambda *given: next(few) and delta_steps_ops.takes(*given))
    most = cycle((0, 1 << 20))  # so that launches are now those of many requests, now of few
    monkeypatch.setattr(delta_rule_ops, "limits_of", lambda _: SimpleNamespace(processors=next(most)))
    # private: all chunks here have fewer tokens
    monkeypatch.setattr(delta_rule_ops, "_FEW_TOKENS", 0)
    layer = Layer(ops, WHOLE, (state, entry))
    assert check_passes(layer, 200, 0, [1, 16, 17, 100, 200], trees=100, nodes=64) < 5e-2


@pytest.mark.skipif(DEVICE == "cuda", reason="those before it run them")
@pytest.mark.parametrize(
    ("dtype", "length", "parents"),
    [
        (torch.float32, 75, [-1]),
        (torch.bfloat16, 125, [-1, 0, 1, 2]),
        (torch.float32, 62, [-1, 0, 1, 1, 3, 2]),
        (torch.bfloat16, 93, [-1, 0, 1, 0, 2, 4, 3, 6]),
    ],
)
def test_steps_in_gluon(dtype: torch.dtype, length: int, parents: list[int]) -> None:
    """Trees complete a group and begin a block, without a state before it and with one."""
    torch.manual_seed(0)
    steps, count, unused = on_cpu(delta_steps_ops).delta_steps, len(parents), 3
    layer = Layer(reference, WHOLE, (dtype, torch.bfloat16))
    state, key, value, decay = (table[1] for table in layer.kept)
    held = torch.arange(int(lag(torch.tensor(length), WHOLE.block)), length) % len(key)
    for table in (key, value):
        table[held] = 0.1 * torch.randn_like(table[held])
    decay[held] = -0.1 * torch.rand_like(decay[held])
    if length >= len(key):
        state.normal_(std=0.1)
    layer.inputs_RWC.normal_(std=0.1)
    drawn, runs = layer.draw(count + unused), layer.runs([1], [length], [count], parents)
    more = (F.pad(each, (0, 0) * (each.dim() - 1) + (0, unused)) for each in runs[3:6])
    runs = Runs(*runs[:3], *more, *runs[6:])
    expected, left = layer.run(drawn, runs, prompts=False)
    given = lambda inputs, *rest: steps(type(inputs)(*(each.contiguous() for each in inputs)), *rest)  # noqa: E731
    layer.rule = SimpleNamespace(**vars(reference) | {"delta_nodes": given})
    found, made = layer.run(drawn, runs, prompts=False)
    assert not found[count:].any()
    for each, right in ((found, expected), (made.value_TVU, left.value_TVU)):
        torch.testing.assert_close(each[:count], right[:count], atol=1e-2, rtol=1e-2)
        assert (each == right)[:count].float().mean() > 0.99, "all but roundings of some"


@pytest.mark.skipif(DEVICE == "cuda", reason="Triton's interpreter finds it")
def test_reads_beyond_a_tensor_are_found() -> None:
    with pytest.raises(
        OutOfBounds, match=r"_trace_back_kernel at inputs.py:\d+ .* elements 0 to 2 of argument 1 .*64 \[2\]"
    ):
        ops.trace_back(torch.arange(2), torch.ones(3, dtype=torch.int64), 1, 4)


@pytest.mark.parametrize(("rule", "sizes"), [(reference, SMALL), (ops, INTERPRETED)])
def test_runs_of_several_rows(rule: Any, sizes: Sizes) -> None:
    """Together they have the bits that each has alone, next to an empty run of padding."""
    torch.manual_seed(1)
    alone = Layer(rule, sizes, (torch.float32, torch.float32))
    both = alone.copy(fresh=True)
    first, second = alone.draw(sizes.block * 2 + 3), alone.draw(6)
    expected = [alone.prompts([first], [0], [0])[0], alone.prompt(second, 0)]
    begun = both.prompts([part(first, 0, 9)], [0], [0])[0]
    rest, other, _ = both.prompts([part(first, 9, 99), second, part(second, 0, 0)], [0, 1, 2], [9, 0, 1])
    assert torch.equal(torch.cat([begun, rest]), expected[0])
    assert torch.equal(other, expected[1])
    assert both.same(alone, 0, len(first.x_TC))
    assert both.same(alone, 1, 6)
