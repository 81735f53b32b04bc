"""What decides between an operation's two versions."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from types import SimpleNamespace
from typing import cast

import pytest
import specserve_kernels
import torch
from specserve_kernels import dispatch
from torch import Tensor


@dataclass
class Pair:
    one: Tensor
    members: tuple[Tensor | int, ...]


def test_every_tensor_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """By position, by name, in tuples and in dataclasses."""
    a, b, c, d, e, f = torch.zeros(6, 2).unbind()
    seen: list[Tensor] = []
    monkeypatch.setattr(dispatch, "runs_triton", lambda tensors: bool(seen.extend(tensors)))

    def reference(*args: object, **kwargs: object) -> int:
        return len(args) + len(kwargs)

    call = dispatch.dispatched(reference)
    assert call(a, 3, (b, 0.5, None), Pair(c, (d, 1)), None, named=e, pair=(f, "text")) == 7
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in (a, b, c, d, e, f)]


@pytest.mark.gpu
def test_a_tensor_that_triton_does_not_serve() -> None:
    there, wide = torch.zeros(2, device="cuda"), torch.zeros(2, device="cuda", dtype=torch.float64)
    assert dispatch.runs_triton([there, there])
    assert not dispatch.runs_triton([there, wide])
    assert not dispatch.runs_triton([there, torch.zeros(2)])
    assert not dispatch.runs_triton([])


def test_what_is_trained_takes_the_reference() -> None:
    """Which has a gradient."""
    trained = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, requires_grad=True)
    assert not dispatch.runs_triton([cast(Tensor, trained)])
    with torch.no_grad():
        assert dispatch.runs_triton([cast(Tensor, trained)])


def test_what_is_compiled_takes_the_reference() -> None:
    """``torch.compile`` fuses it, and can't trace every kernel of ours."""
    runs_triton = torch.compile(lambda x: (x + 1, dispatch.runs_triton([x])), backend="eager")
    x = torch.zeros(2, device="meta")
    assert dispatch.runs_triton([x])
    assert not runs_triton(x)[1]


def test_every_operation_has_both_versions() -> None:
    """With the same parameters."""
    pytest.importorskip("triton")
    references = [
        each.__wrapped__ for each in vars(specserve_kernels).values() if hasattr(each, "__wrapped__")
    ]
    assert len(references) > 20
    for reference in references:
        module = import_module(reference.__module__.replace(".reference.", ".ops."))
        found = getattr(module, reference.__name__)
        assert signature(found).parameters.keys() == signature(reference).parameters.keys()
