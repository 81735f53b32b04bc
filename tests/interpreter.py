"""Triton's interpreter, faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from math import prod
from typing import Any
from unittest.mock import patch


@contextmanager
def types_are_remembered() -> Iterator[None]:
    """For each result of an operation the interpreter makes a block's type with its checks and its name, and a tensor's
    shape, and to look up a type in NumPy a table of all: nearly half of its time. Here each is made once."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    make_type = core.block_type.__init__
    broadcast = TritonSemantic.broadcast_impl_value
    find_np_dtype = interpreter._get_np_dtype
    blocks: dict[tuple[object, ...], dict[str, Any]] = {}
    np_dtypes: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_type(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key], element_ty=element_ty)

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(prod(sizes))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape) if type.is_block() else ())

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def np_dtype(type: Any) -> Any:
        name = type.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = find_np_dtype(type)
        return np_dtypes[name]

    with ExitStack() as stack:
        stack.enter_context(patch.object(core.block_type, "__init__", init_type))
        stack.enter_context(patch.object(core.tensor, "__init__", init_tensor))
        stack.enter_context(patch.object(TritonSemantic, "broadcast_impl_value", broadcast_others))
        stack.enter_context(patch.object(interpreter, "_get_np_dtype", np_dtype))
        yield
