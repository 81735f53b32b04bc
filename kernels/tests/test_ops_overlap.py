"""Launches that overlap: each waits before it touches anything but weights, and gives what it gives alone."""

from __future__ import annotations

import ast
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from specserve_kernels import quantize
from specserve_kernels.ops import overlap
from specserve_kernels.ops.activation import silu_and_mul
from specserve_kernels.ops.linear import linear_few
from specserve_kernels.ops.norm import add_rms_norm
from specserve_kernels.ops.quantized_linear import quantized_linear
from torch import Tensor

OPS = Path(overlap.__file__).parent
WAITS = {"take_turn", "wait_for_inputs"}
TOUCHES = {"load", "store", "atomic_add", "load_block"}
ALONE = {"_prefill_kernel"}  # long enough not to gain


def kernels() -> dict[str, ast.FunctionDef]:
    """What is launched: functions that Triton compiles and no other such function calls."""
    trees = [ast.parse(file.read_text()) for file in sorted(OPS.glob("*.py"))]
    compiled = {
        node.name: node
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    }
    called = {name for node in compiled.values() for name in _calls(node)}
    return {name: node for name, node in compiled.items() if name not in called}


def _calls(node: ast.AST) -> list[str]:
    found = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return [func.attr if isinstance(func, ast.Attribute) else ast.unparse(func) for func in found]


@pytest.mark.parametrize("name", sorted(kernels().keys() - ALONE))
def test_every_program_waits_first(name: str) -> None:
    body = kernels()[name].body
    waits = [index for index, line in enumerate(body) if WAITS & set(_calls(line))]
    assert len(waits) == 1
    assert isinstance(body[waits[0]], ast.Expr), "not every program comes by here"
    for line in body[: waits[0]]:
        assert not TOUCHES & set(_calls(line)), ast.unparse(line)
        assert not any(isinstance(inner, ast.Return) for inner in ast.walk(line)), ast.unparse(line)


def test_the_list_of_those_alone_is_true() -> None:
    assert kernels().keys() >= ALONE
    for name in ALONE:
        assert not WAITS & set(_calls(kernels()[name]))


def test_nothing_overlaps_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap.knobs.runtime, "interpret", True)
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
    assert overlap._overlap.__wrapped__(0) == (
        {"OVERLAP": True, "launch_pdl": True} if overlaps else {"OVERLAP": False}
    )


@pytest.mark.gpu
def test_a_chain_gives_what_its_kernels_give_one_by_one() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("launches don't overlap here")
    hidden, inner, tokens, layers = 2048, 4096, 5, 24

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x_TH, norm_H = draw(tokens, hidden), draw(hidden)
    wide = [draw(2 * inner, hidden) * hidden**-0.5 for _ in range(layers)]
    narrow = [quantize(draw(hidden, inner) * inner**-0.5, torch.int8) for _ in range(layers)]

    def chain() -> Tensor:
        x, residual = x_TH, torch.zeros_like(x_TH)
        for up, down in zip(wide, narrow, strict=True):
            x, residual = add_rms_norm(x, residual, norm_H, 1e-5)
            x = quantized_linear(silu_and_mul(linear_few(x, up)), *down)
        return x + residual

    with mock.patch.object(overlap, "_overlap", return_value={"OVERLAP": False}):
        expected = chain()
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(50):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)
