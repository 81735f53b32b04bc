"""Launches that overlap: each waits before it touches anything but weights, and gives what it gives alone."""

from __future__ import annotations

import ast
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from specserve_kernels import quantize
from specserve_kernels.ops import pdl as overlap
from specserve_kernels.ops.attention.attention import Workspace, attend_nodes
from specserve_kernels.ops.attention.paths import list_paths
from specserve_kernels.ops.layer.norm import add_rms_norm, add_rms_norm_rounded, embed_rms_norm
from specserve_kernels.ops.layer.rotary import rotary_store_kv
from specserve_kernels.ops.linear.integer import integer_linear
from specserve_kernels.ops.linear.linear import linear
from specserve_kernels.ops.linear.swap_ab import swap_ab_linear
from specserve_kernels.ops.tree.gather_slots import gather_slots
from torch import Tensor

OPS = Path(overlap.__file__).parent
WAITS = ("take_turn(OVERLAP)", "wait_for_inputs(OVERLAP)")
BEFORE = {
    "program_id",
    "num_programs",
    "arange",
    "full",
    "zeros",
    "to",
    "where",
    "cdiv",
    "minimum",
    "maximum",
    "sum",
    "exp",
    "dot",
    "range",
    "static_range",
}
BEFORE |= {"max", "cumsum", "outputs_of", "load_settled", "request_of"}  # compute, or read what is old enough
BEFORE.add("ask_for")  # which reads nothing
AHEAD = {"_linear_ahead_kernel", "_rotary_store_kv_kernel"}  # see ``let_next_begin``
# Weights: ``waits_first`` in ``tests/compiled_launches.py`` checks what.
COPIES_FIRST = {"_specialized_kernel", "_streamed_kernel", "_latents_kernel"}
COPIES_FIRST |= {"streamed_gate_up_kernel", "streamed_down_kernel", "_steps_kernel"}
ALONE = {"_prefill_kernel"}  # long, and launched as others are, after all that came before it


@cache
def functions() -> list[ast.FunctionDef]:
    """That Triton compiles. Several may have one name."""
    trees = [ast.parse(file.read_text()) for file in sorted(OPS.rglob("*.py"))]
    return [
        node
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(
            {"triton.jit", "gluon.jit"} & {ast.unparse(getattr(d, "func", d))} for d in node.decorator_list
        )
    ]


def compiled() -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in functions()}


@cache
def kernels() -> dict[str, ast.FunctionDef]:
    """What is launched: functions that Triton compiles and no other such function calls or gives away."""
    called = {name for node in functions() for name in (*_calls(node), *_given(node))}
    return {name: node for name, node in compiled().items() if name not in called}


def _given(node: ast.AST) -> set[str]:
    launches = [
        inner
        for inner in ast.walk(node)
        if isinstance(inner, ast.Call)
        and ast.unparse(inner.func) in ("gl.warp_specialize", "gl.associative_scan")
    ]
    return {inner.id for launch in launches for inner in ast.walk(launch) if isinstance(inner, ast.Name)}


def _calls(node: ast.AST) -> list[str]:
    found = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return [func.attr if isinstance(func, ast.Attribute) else ast.unparse(func) for func in found]


def _ends_in(node: ast.AST) -> set[str]:
    """What is called there, and by functions of ours that are called there and not known as harmless."""
    names = set(_calls(node))
    ours = {name for name in names - BEFORE if name in compiled()}
    return (names - ours).union(*(_ends_in(compiled()[name]) for name in ours))


def test_every_program_waits_first() -> None:
    for name in kernels().keys() - ALONE - COPIES_FIRST:
        body = [line for line in kernels()[name].body if not isinstance(line, ast.Expr) or not _is_text(line)]
        if name in AHEAD:
            (first,) = [index for index, line in enumerate(body) if "let_next_begin" in ast.unparse(line)]
            assert ast.unparse(body.pop(first)) == "let_next_begin(OVERLAP)"
        _waits_first(name, body)


def _waits_first(name: str, body: list[ast.stmt]) -> None:
    """A loop before the wait has a wait of its own."""
    (wait,) = [index for index, line in enumerate(body) if ast.unparse(line) in WAITS]
    for line in body[:wait]:
        if isinstance(line, ast.While):
            assert _ends_in(line.test) <= BEFORE
            _waits_first(name, line.body)
        else:
            assert _ends_in(line) <= BEFORE, f"{name}: {ast.unparse(line)}"
        assert not any(isinstance(inner, ast.Return) for inner in ast.walk(line)), ast.unparse(line)


def _is_text(line: ast.Expr) -> bool:
    return isinstance(line.value, ast.Constant)


def test_parts_are_stored_before_a_ticket_says_so() -> None:
    """By all threads of the program: a barrier stands right before each ticket."""
    found = [
        (node.name, before.strip())
        for node in functions()
        for before, line in pairwise(ast.unparse(node).splitlines())
        if "sem='acq_rel'" in line
    ]
    assert sorted(found) == [
        ("_attend_half", "barrier()"),
        ("_attend_kernel", "tl.debug_barrier()"),
        ("_down_kernel", "tl.debug_barrier()"),
        ("_multiply_floats", "barrier()"),
        ("_route_kernel", "tl.debug_barrier()"),
        ("_route_kernel", "tl.debug_barrier()"),
        ("_share_sums", "barrier()"),
        ("_share_sums", "barrier()"),
        ("_streamed_kernel", "barrier()"),
        ("store_partial", "tl.debug_barrier()"),
        ("streamed_down_kernel", "barrier()"),
    ]


def test_who_reads_before_it_waits() -> None:
    """And what: as the docstrings of these say. ``READ_EARLY`` in ``tests/compiled_launches.py`` names it, too."""
    early = {
        name: {ast.unparse(call.args[0]).split(" ")[0] for call in ast.walk(node) if _is_early(call)}
        for name, node in compiled().items()
    }
    assert {name: read for name, read in early.items() if read} == {
        "_attend_kernel": {"length_B", "q_start"},
        "work_of": {"length_B", "q_start"},  # of _attend_kernel
        "lows_of": {"mask_T"},
        "load_pages": {"table"},
        "ask_for_rows": {"table"},
        "_add_rms_norm_kernel": {"weight_ptr", "residual_ptr"},
        "_down_kernel": {"order_ptr", "tile_ptrs"},
        "streamed_down_kernel": {"tile_ptrs"},
        "_gate_heads_kernel": {"gate_ptr", "weight_ptr"},
        "_route_kernel": {"weight_ptrs"},
        "_gate_rows_kernel": {"x_ptr", "weight_ptr"},
        "_linear_ahead_kernel": {"x_ptrs", "weight_ptrs"},
        "_multiply_kernel": {"weight_ptrs"},
        "_rotary_store_kv_kernel": {"position_ptr", "pages_ptr", "place_ptr"},
        "_grow_kernel": {"length_ptr"},
        "_inputs_kernel": {"weight_ptr", "rate_ptr", "bias_ptr"},
        "_delta_kernel": {"rows_ptr", "length_ptr", "q_start"},
        "_read_state": {"at"},  # of _delta_kernel, after the wait
        "_steps_kernel": {"rows_ptr", "length_ptr", "q_start", "state_CX", "from_CX", "from_NR"},
        "_rows": {"position_ptr"},  # of _steps_kernel
        "_kept_taps": {"rows_ptr", "position_ptr", "back_ptr", "kept"},  # of _inputs_kernel
        "_kept_decays": {"rows_ptr", "position_ptr", "back_ptr", "at_EH"},
        "request_of": {"rows"},
        "_entry": {"column"},  # of the sampling table, for request_of
    }


def _is_early(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "load_settled"


def test_the_list_of_those_alone_is_true() -> None:
    assert kernels().keys() >= ALONE
    for name in ALONE:
        assert "OVERLAP" not in ast.unparse(kernels()[name])


def test_nothing_overlaps_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "INTERPRETED", True)
    assert overlap.overlap() == {"OVERLAP": False}


@pytest.mark.parametrize(
    ("backend", "arch", "overlaps"),
    [("cuda", 90, True), ("cuda", 120, True), ("cuda", 89, False), ("hip", "gfx942", False)],
)
def test_devices_that_can(
    backend: str, arch: int | str, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = mock.Mock()
    driver.active.get_current_target.return_value = mock.Mock(backend=backend, arch=arch)
    monkeypatch.setattr(overlap, "driver", driver)
    assert overlap.overlap_on.__wrapped__(0) == (
        {"OVERLAP": True, "launch_pdl": True} if overlaps else {"OVERLAP": False}
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [5, 24, 100])
def test_a_chain_gives_what_its_kernels_give_one_by_one(tokens: int) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("launches don't overlap here")
    hidden, inner, layers = 2048, 4096, 24
    heads, size, length = 16, 128, 40

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    slots = 1 + tokens // 64
    nodes = tokens // slots
    table_VH, norm_H, ids_T = draw(tokens, hidden), draw(hidden), torch.arange(tokens, device="cuda")
    mixes = [draw((heads + 2) * size, hidden) * hidden**-0.5 for _ in range(layers)]
    pages_RM, rope_P2D = torch.arange(6 * slots, device="cuda").view(slots, 6), draw(length + nodes, 2, size)
    rows_B, length_R = torch.arange(slots, device="cuda"), torch.full((slots,), length, device="cuda")
    position_T = length + ids_T % nodes
    place_T = ids_T // nodes * 96 + position_T
    q_start = torch.arange(0, tokens + 1, nodes, device="cuda")
    mask_T = (2 << ids_T % nodes) - 1
    levels = None if tokens % 3 else nodes  # a chain's keys stand at their positions, a tree's are gathered
    first_cache = draw(6 * slots, 2, 16, 1, size)
    cache = first_cache.clone()
    wide = [draw(2 * inner, hidden) * hidden**-0.5 for _ in range(layers)]
    square = quantize(draw(hidden, hidden) * hidden**-0.5, torch.int8)
    narrow = [quantize(draw(hidden, inner) * inner**-0.5, torch.int8) for _ in range(layers)]

    def chain() -> Tensor:
        workspace = Workspace()
        _, length_B, _, pages = gather_slots(rows_B, length_R, length_R, pages_RM[None])
        paths = None if levels is None else list_paths(mask_T, q_start, length_B, levels, nodes)
        read, residual = embed_rms_norm(ids_T, table_VH, norm_H, 1e-5)
        x = integer_linear(read, *square)
        for mix, up, down in zip(mixes, wide, narrow, strict=True):
            x, residual = add_rms_norm(x, residual, norm_H, 1e-5)
            # Programs that share tiles, or a launch that does not overlap.
            mixed = swap_ab_linear(x, mix) if 16 < tokens <= 64 else torch.nn.functional.linear(x, mix)
            qkv = mixed.view(tokens, -1, size)
            q = rotary_store_kv(qkv, rope_P2D, position_T, 1, cache, pages[0], place_T)
            tree = q_start, paths, nodes
            x = attend_nodes(q, cache, pages[0], length_B, *tree, workspace).flatten(1)
            if tokens < 16:  # where the later chains have other launches after each other
                read, residual = add_rms_norm_rounded(x, residual, norm_H, 1e-5, torch.int8)
                x = integer_linear(read, *square)
            x, residual = add_rms_norm(x, residual, norm_H, 1e-5)
            gated = swap_ab_linear(x, up, "silu") if tokens > 64 else linear(x, up, None, "silu")
            x = integer_linear(gated, *down)
        return x + residual

    def captured() -> tuple[torch.cuda.CUDAGraph, Tensor]:
        chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain()
        return graph, found

    overlapping = captured()
    with mock.patch.object(overlap, "overlap_on", return_value={"OVERLAP": False}):
        one_by_one = captured()
    for _ in range(30):
        table_VH.copy_(draw(tokens, hidden))
        for graph, _ in (overlapping, one_by_one):
            cache.copy_(first_cache)
            graph.replay()
        assert torch.equal(overlapping[1], one_by_one[1])
        assert overlapping[1].isfinite().all()
