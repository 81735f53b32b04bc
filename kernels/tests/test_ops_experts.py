"""Mixtures of experts: the router's choice against plain Python, and the Triton kernels against the reference.

On a CPU the kernels are interpreted, in float32; on a GPU they run, in all of their types.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from specserve_kernels.reference.linear.floats import FLOATS4
from specserve_kernels.reference.linear.packed import Numbers, Packed, pack
from specserve_kernels.reference.linear.quantize import FP8, PAIRED, Rounded
from torch import Tensor

from kernels.tests.gluon import on_cpu

pytest.importorskip("triton")
from specserve_kernels.ops.experts import add, streamed, words
from specserve_kernels.ops.experts import experts as ops
from specserve_kernels.ops.experts import route as routing_ops
from specserve_kernels.ops.linear import floats as packed_floats
from specserve_kernels.ops.linear.quantize import round_inputs
from specserve_kernels.reference.experts import experts as reference
from specserve_kernels.reference.experts import route as routing_reference
from specserve_kernels.reference.experts.experts import ExpertWeights
from specserve_kernels.reference.experts.route import Routes, Routing, Tiles

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ROUTINGS = {
    "softmax of all": Routing(8, 2),
    "not normalized, scaled": Routing(6, 3, normalize=False, scale=16.0),
    "sigmoid": Routing(12, 4, scores="sigmoid", scale=2.5),
    "best group": Routing(20, 3, normalize=False, groups=4, chosen_groups=2),
    "two best of a group": Routing(24, 4, scores="sigmoid", groups=4, chosen_groups=2, group_best=2),
    "one of many": Routing(130, 1),
    "two shared ones": Routing(12, 3, scale=2.0, shared=2),
    "shared, in groups": Routing(
        24, 4, "sigmoid", scale=2.0, groups=4, chosen_groups=2, group_best=2, shared=1
    ),
}


def plain_choice(
    logits: list[float], correction: list[float], routing: Routing, share: float
) -> dict[int, float]:
    """The experts of one token, with their weights, as published."""
    if routing.scores == "softmax":
        total = sum(map(math.exp, logits))
        scores = [math.exp(each) / total for each in logits]
    else:
        scores = [1 / (1 + math.exp(-each)) for each in logits]
    wish = [score + more for score, more in zip(scores, correction, strict=True)]
    size = routing.experts // routing.groups
    groups = [range(first, first + size) for first in range(0, routing.experts, size)]
    good = [sum(sorted((wish[e] for e in group), reverse=True)[: routing.group_best]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda g: (-good[g], g))[: routing.chosen_groups]
    allowed = [e for g in kept for e in groups[g]]
    chosen = sorted(sorted(allowed, key=lambda e: (-wish[e], e))[: routing.chosen])
    total = sum(scores[e] for e in chosen) if routing.normalize else 1
    return {e: scores[e] / total * routing.scale for e in chosen} | {
        routing.experts + number: share for number in range(routing.shared)
    }


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("module", [routing_reference, routing_ops], ids=["reference", "ops"])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_tokens_choose_as_published(routing: Routing, module: object, corrected: bool) -> None:
    """By inputs of two parts."""
    torch.manual_seed(0)
    x_TH = torch.randn(19, 300, device=DEVICE)
    weight_EH, bias_E = torch.randn(routing.experts, 300, device=DEVICE) / 10, torch.randn(routing.experts)
    correction_E = torch.randn(routing.experts, device=DEVICE) / 2 if corrected else None
    gate_1H = torch.randn(1, 300, device=DEVICE) / 10 if routing.shared == 1 else None
    routes = module.route(x_TH, weight_EH, routing, bias_E.to(DEVICE), correction_E, gate_1H)  # type: ignore[attr-defined]
    shares = [1.0] * 19 if gate_1H is None else (x_TH.double() @ gate_1H[0].double()).sigmoid().tolist()
    logits = (x_TH.double() @ weight_EH.double().T).cpu() + bias_E
    correction = [0.0] * routing.experts if correction_E is None else correction_E.tolist()
    assert routes.expert_TK.dtype == torch.int32
    for row, share, experts, weights in zip(
        logits.tolist(), shares, *map(Tensor.tolist, routes[:2]), strict=True
    ):
        wanted = plain_choice(row, correction, routing, share)
        assert experts == [*wanted]
        assert weights == pytest.approx([*wanted.values()], rel=1e-4)


@pytest.mark.parametrize("module", [routing_reference, routing_ops], ids=["reference", "ops"])
def test_of_equal_experts_and_groups_the_first_are_chosen(module: object) -> None:
    x_TH, weight_EH = torch.ones(2, 16, device=DEVICE), torch.zeros(16, 16, device=DEVICE)
    weight_EH[5:9] = 1.0
    routing = Routing(16, 3)
    route = module.route  # type: ignore[attr-defined]
    assert route(x_TH, weight_EH, routing).expert_TK.tolist() == [[5, 6, 7]] * 2
    grouped = replace(routing, chosen=4, groups=4, chosen_groups=1)
    assert route(x_TH, weight_EH, grouped).expert_TK.tolist() == [[4, 5, 6, 7]] * 2, "8 is as good"
    assert (
        route(x_TH, 0 * weight_EH, replace(grouped, chosen_groups=2)).expert_TK.tolist() == [[0, 1, 2, 3]] * 2
    )


def in_order(expert_TK: Tensor, experts: int, shared: int = 0) -> Tiles:
    """What ``route`` makes of a choice, in plain Python. ``experts``: the last are ``shared``."""
    choices = expert_TK.flatten().tolist()
    size = routing_ops.pairs_of_tile(len(choices), experts)
    order = sorted(range(len(choices)), key=lambda pair: (choices[pair], pair))
    tiles = []
    for expert in (*range(experts - shared, experts), *range(experts - shared)):
        first, many = sum(each < expert for each in choices), choices.count(expert)
        tiles += [(expert, at, first + many) for at in range(first, first + many, size)]
    spare = min(len(choices), len(choices) // size + min(experts, len(choices))) - len(tiles)
    rows = [*tiles, *[(experts, 0, 0)] * spare, (len(tiles), 0, 0)]
    return Tiles(*(torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (order, rows)))


def with_tiles(routes: Routes, experts: int) -> Routes:
    return Routes(*(each.to(DEVICE) for each in routes[:2]), in_order(routes.expert_TK, experts))


def drawn(
    tokens: int, count: int, chosen: int, size: int, inner: int, biased: bool, dtype: torch.dtype
) -> tuple[Tensor, Routes, ExpertWeights]:
    torch.manual_seed(tokens)
    x_TH = torch.randn(tokens, size)
    routing = Routing(count, chosen)
    routes = routing_reference.route(x_TH, torch.randn(count, size) / size**0.5, routing)
    weights = [torch.randn(count, 2 * inner, size) / size**0.5, torch.randn(count, size, inner) / inner**0.5]
    biases = [torch.randn(count, 2 * inner), torch.randn(count, size)] if biased else [None, None]
    made = [None if each is None else each.to(DEVICE, dtype) for each in (*weights, *biases)]
    return x_TH.to(DEVICE, dtype), with_tiles(routes, count), ExpertWeights(*made)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "count", "chosen", "size", "inner", "biased"),
    [
        (1, 8, 2, 48, 24, False),
        (3, 5, 5, 130, 70, True),
        (40, 6, 2, 64, 32, False),
        (70, 4, 3, 40, 136, True),
        (150, 2, 1, 32, 16, False),
    ],
)
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "clamped_silu"])
def test_sums_of_experts(
    tokens: int, count: int, chosen: int, size: int, inner: int, biased: bool, dtype: torch.dtype, gate: str
) -> None:
    x_TH, routes, experts = drawn(tokens, count, chosen, size, inner, biased, dtype)
    shared_TH = torch.randn_like(x_TH) if biased else None
    found = ops.run_experts(x_TH, routes, experts, gate, shared_TH)  # type: ignore[arg-type]
    wide = ExpertWeights(*(None if each is None else each.double() for each in experts[:4]))  # type: ignore[arg-type, union-attr]
    shared = None if shared_TH is None else shared_TH.double()
    expected = reference.run_experts(x_TH.double(), routes, wide, gate, shared)  # type: ignore[arg-type]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=3 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("tokens", [3, 40])
def test_sums_of_some_of_the_experts(tokens: int, request: pytest.FixtureRequest) -> None:
    """Those of others, whose weights are elsewhere, add nothing, whatever memory holds."""
    dtype = DTYPES[0]
    torch.use_deterministic_algorithms(True)  # fills what is made with NaN
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    x_TH, routes, experts = drawn(tokens, 6, 3, 64, 32, True, dtype)
    shared_TH = torch.randn_like(x_TH)
    for first, end in ((0, 2), (2, 6)):
        own = ExpertWeights(*(each[first:end] for each in experts[:4]))  # type: ignore[index, arg-type]
        wide = ExpertWeights(*(each.double() for each in own[:4]))  # type: ignore[union-attr]
        found = ops.run_experts(x_TH, routes, own, "silu", shared_TH, first, 6)
        expected = reference.run_experts(x_TH.double(), routes, wide, "silu", shared_TH.double(), first)
        torch.testing.assert_close(found.double(), expected, atol=3 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def as_in_a_file(weight_EOI: Tensor, kind: str) -> tuple[Packed, Tensor]:
    """(what a file holds, what it means in float64) of random numbers of this shape; ``kind`` begins with their dtype,
    then how many inputs share a scale, 0 for all, and outputs."""
    name, group, rows, *zeros = kind.split()
    outputs, inputs, many = (
        weight_EOI[..., 0].numel(),
        weight_EOI.shape[-1],
        int(group) or weight_EOI.shape[-1],
    )
    if name == "fp8":
        values_OI = (weight_EOI.flatten(0, 1) * 50).to(FP8)
    else:
        few = name in ("int4", "floats4")
        low, high = (0, 16) if few else (-128, 128)
        values_OI = torch.randint(low, high, (outputs, inputs), dtype=torch.uint8 if few else torch.int8)
    groups, at_O, at_I = -(-inputs // many), torch.arange(outputs) // int(rows), torch.arange(inputs) // many
    scale_SG = (torch.rand(-(-outputs // int(rows)), groups) + 0.5) / 400
    scale_SG, unit_O1 = scale_SG.half() if name == "int4" else scale_SG, None
    if name == "floats4":
        scale_SG, unit_O1 = (scale_SG * 400).to(FP8).float(), torch.rand(outputs, 1) / 20
    zero_OG = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8) if zeros else None
    less = 8.0 if name == "int4" else 0.0
    zero_OI = less if zero_OG is None else zero_OG[:, at_I].double()
    plain_OI = values_OI.double() - zero_OI
    if name == "floats4":
        plain_OI = torch.tensor([*FLOATS4, *(-each for each in FLOATS4)]).double()[values_OI.int()]
    meant_OI = plain_OI * scale_SG.double()[at_O][:, at_I]
    meant_OI = meant_OI if unit_O1 is None else meant_OI * unit_O1
    numbers = Numbers(values_OI, scale_SG, zero_OG, int(group), int(rows), None, unit_O1 is not None, unit_O1)
    held = pack(numbers, stacked=True)
    moved = (each.to(DEVICE) if isinstance(each, Tensor) else each for each in held)
    return Packed(*moved), meant_OI.view(weight_EOI.shape).to(DEVICE)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("module", [reference, ops], ids=["reference", "ops"])
@pytest.mark.parametrize(
    "kind",
    [
        "fp8 0 1",
        "fp8 128 128",
        "fp8 128 3",
        "int8 0 1",
        "int8 64 1",
        "int4 0 1",
        "int4 32 1",
        "int4 128 1 zeros",
        "floats4 32 1",
        "floats4 16 1",
    ],
)
@pytest.mark.parametrize("tokens", [3, 40])
def test_sums_of_experts_as_in_a_file(tokens: int, kind: str, module: object, dtype: torch.dtype) -> None:
    """Of sizes that end within a group and within 16 bytes, next to weights that are plain, and with biases; also if
    others read x in 15 bits."""
    x_TH, routes, experts = drawn(tokens, 3, 2, 168, 88, True, dtype)
    read = x_TH if tokens == 40 else round_inputs(x_TH, PAIRED)._replace(given_TI=x_TH)
    gate_up, meant_gate_up = as_in_a_file(experts.gate_up.cpu().float(), kind)  # type: ignore[union-attr]
    down, meant_down = as_in_a_file(experts.down.cpu().float(), kind)  # type: ignore[union-attr]
    down, meant_down = (experts.down, experts.down.double()) if tokens == 40 else (down, meant_down)  # type: ignore[union-attr]
    biases, rounded = experts[2:4], (kind.startswith("fp8"), kind.startswith("fp8") and tokens < 40)
    found = module.run_experts(read, routes, ExpertWeights(gate_up, down, *biases), "silu")  # type: ignore[attr-defined]
    wide = ExpertWeights(meant_gate_up, meant_down, *(each.double() for each in biases), rounded)  # type: ignore[union-attr]
    expected = reference.run_experts(x_TH.double(), routes, wide, "silu")
    scale = expected.abs().max().item()
    torch.testing.assert_close(
        found.double(), expected, atol=3 * scale * TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.skipif(ON_GPU, reason="those before it run them")
@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("int4 128 1 zeros", 5), ("floats4 32 1", 20), ("int4 128 1", 150)],
)
def test_experts_in_gluon(kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three, in tiles of 16, 32 and 128. Chunks take turns in shared memory; the last has one step, of few
    inputs."""
    x_TH, routes, experts = drawn(tokens, 3, 2, 1032, 328, True, torch.bfloat16)
    weights, meant = zip(*(as_in_a_file(each[1:].float(), kind) for each in experts[:2]), strict=True)  # type: ignore[index]
    added, numbers, floats = map(on_cpu, (add, words, packed_floats))
    module = on_cpu(
        streamed,
        is_own=added.is_own,
        add_outputs=added.add_outputs,
        weight_of_nibbles=numbers.weight_of_nibbles,
        factors=floats.factors,
        weight_by=floats.weight_by,
        across=lambda each_O, like: each_O[:, None].expand_as(like),
        scale_of=lambda word, half, dtype: word.view(dtype).view(-1, 2)[:, half].float(),
        add_scaled=lambda product, scale_O, sums: product * scale_O[:, None] + sums,
        activate=lambda gate, up, _: torch.nn.functional.silu(gate) * up,
    )

    def launch(weight: Packed, tile: int, _: float, gates: bool) -> Any:
        _, tensors, options, outputs = streamed.streamed(weight, tile, 200, gates)
        kernel = module.streamed_gate_up_kernel if gates else module.streamed_down_kernel
        scale = torch.int32 if weight.floats else weight.scale_WSN.dtype
        return kernel, tensors, options | {"SCALE": scale}, outputs

    monkeypatch.setattr(ops, "streams", lambda *_, **__: True)
    monkeypatch.setattr(ops, "streamed", launch)
    biases = [each[1:] for each in experts[2:4]]  # type: ignore[index]
    found = ops.run_experts(x_TH, routes, ExpertWeights(*weights, *biases), "silu", None, 1, 3)
    wide = ExpertWeights(*meant, *(each.double() for each in biases))
    expected = reference.run_experts(x_TH.double(), routes, wide, "silu", None, 1, 3)
    torch.testing.assert_close(found.double(), expected, atol=1e-2 * expected.abs().max().item(), rtol=2e-2)


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "shared"),
    [(3, 40, 4, 0), (3, 40, 3, 2), (40, 6, 3, 1), (64, 128, 8, 0), (90, 37, 4, 0), (150, 2, 2, 2)],
)
def test_pairs_are_put_in_order(tokens: int, experts: int, chosen: int, shared: int) -> None:
    """By the launch that chooses, and by another; in tiles of all sizes."""
    torch.manual_seed(tokens)
    x_TH, weight_EH = torch.randn(tokens, 16, device=DEVICE), torch.randn(experts, 16, device=DEVICE)
    routes = routing_ops.route(x_TH, weight_EH, Routing(experts, chosen, shared=shared))
    assert routes.tiles is not None
    wanted = in_order(routes.expert_TK, experts + shared, shared)
    assert routes.tiles.order_P.tolist() == wanted.order_P.tolist()
    used = int(wanted.tile_X3[-1, 0])
    assert routes.tiles.tile_X3.shape == wanted.tile_X3.shape
    assert routes.tiles.tile_X3[:used].tolist() == wanted.tile_X3[:used].tolist()
    assert routes.tiles.tile_X3[used:, 0].tolist() == wanted.tile_X3[used:, 0].tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("groups", [1, 2])
def test_a_token_without_numbers_spoils_no_other(groups: int) -> None:
    x_TH, weight_EH = torch.randn(3, 16, device=DEVICE), torch.randn(8, 16, device=DEVICE)
    routing = Routing(8, 3, groups=groups)
    expected = routing_ops.route(x_TH, weight_EH, routing)
    x_TH[1] = math.nan
    found = routing_ops.route(x_TH, weight_EH, routing)
    assert torch.equal(found.expert_TK[::2], expected.expert_TK[::2])
    assert torch.equal(found.weight_TK[::2], expected.weight_TK[::2])
    assert found.expert_TK[1].tolist() == sorted(set(found.expert_TK[1].tolist()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind", [None, "fp8 128 128", *["int4 128 1", "int4 128 1 zeros", "floats4 32 1"] * ON_GPU]
)
def test_a_token_s_bits_depend_on_no_other_token(kind: str | None, dtype: torch.dtype) -> None:
    """Alone, next to others, in tiles of all sizes, of which on Hopper other kernels run small ones in 4 bits, and
    whether x is already rounded; of all experts, and of some."""
    sizes = (300, 8, 2, 1152, 640) if ON_GPU else (20, 3, 2, 32, 16)
    x_TH, routes, experts = drawn(*sizes, True, dtype)
    read: Tensor | Rounded = x_TH
    if kind is not None and kind.startswith("fp8"):
        read = round_inputs(x_TH, FP8)._replace(given_TI=x_TH)
    for own in (slice(0, sizes[1]), slice(1, 4))[: 1 + ON_GPU]:
        weights, biases = [each[own] for each in experts[:2]], [each[own] for each in experts[2:4]]  # type: ignore[index]
        if kind is not None:
            weights = [as_in_a_file(each.cpu().float(), kind)[0] for each in weights]  # type: ignore[union-attr]
        here, first = ExpertWeights(*weights, *biases), 0  # type: ignore[arg-type]
        whole = ops.run_experts(read, routes, here, "silu", None, own.start, sizes[1])
        for count in itertools.chain([1] * 4, [7, 50, 200]) if ON_GPU else [1, 4]:
            rows = slice(first, first + count)
            chosen = with_tiles(Routes(*(each[rows] for each in routes[:2])), sizes[1])
            found = ops.run_experts(x_TH[rows], chosen, here, "silu", None, own.start, sizes[1])
            assert torch.equal(found, whole[rows])
            first += count


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_s_choice_depends_on_no_other_token(dtype: torch.dtype) -> None:
    """Alone, where other launches serve many, and however many programs share four parts."""
    x_TH, weight_EH = (
        torch.randn(300 if ON_GPU else 66, 1000, device=DEVICE, dtype=dtype),
        torch.randn(40, 1000, device=DEVICE) / 10,
    )
    parts = ((0, 1), (7, 12), (100, 164), (110, 200)) if ON_GPU else ((0, 64), (3, 6))
    gate_1H = torch.randn(1, 1000, device=DEVICE).to(dtype) / 10
    grouped = Routing(40, 6, "sigmoid", groups=4, chosen_groups=2)
    for routing, gate in ((Routing(40, 6, normalize=False, shared=1), gate_1H), (grouped, None)):
        more = weight_EH.to(dtype), routing, None, None, gate
        whole = routing_ops.route(x_TH, *more)
        for split in (1, 2, 4):
            with patch.object(routing_ops, "split_of", lambda *_, split=split: split):
                fewer = routing_ops.route(x_TH, *more)
            assert torch.equal(fewer.expert_TK, whole.expert_TK)
            assert torch.equal(fewer.weight_TK, whole.weight_TK)
        for rows in (slice(*part) for part in parts):
            part = routing_ops.route(x_TH[rows], *more)
            assert torch.equal(part.expert_TK, whole.expert_TK[rows])
            assert torch.equal(part.weight_TK, whole.weight_TK[rows])
