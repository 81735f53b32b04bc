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
    shape, and to look up a type in NumPy a table of all: nearly half of its time. Here each is made once, and so are
    constants and the types that two types give together; and calls and results are checked by nobody in between."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    make_type = core.block_type.__init__
    broadcast = TritonSemantic.broadcast_impl_value
    find_np_dtype = interpreter._get_np_dtype
    cast, common = TritonSemantic.cast, TritonSemantic.computation_type_impl
    constant, semantic = TritonSemantic.scalar_constant, interpreter.interpreter_semantic
    constants: dict[tuple[str, str], Any] = {}
    commons: dict[tuple[object, ...], Any] = {}
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

    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return inner(*args, **named)

        scope.set_attr(owner, name, call)

    def cast_others(self: Any, value: Any, dtype: Any, *rest: Any, **named: Any) -> Any:
        return value if value.dtype is dtype else cast(self, value, dtype, *rest, **named)

    def common_type(self: Any, *operands: Any) -> Any:
        one, one_is_scalar, other, other_is_scalar, divides = operands
        key = one.name, one_is_scalar, other.name, other_is_scalar, divides
        if key not in commons:
            commons[key] = common(self, *operands)
        return commons[key]

    def make_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = repr(value), dtype.name
        if key not in constants:
            constants[key] = constant(self, value, dtype)
        return constants[key]

    with ExitStack() as stack:
        stack.enter_context(patch.object(core.block_type, "__init__", init_type))
        stack.enter_context(patch.object(core.tensor, "__init__", init_tensor))
        stack.enter_context(patch.object(interpreter.TensorHandle, "__init__", init_handle))
        stack.enter_context(patch.object(interpreter, "_patch_attr", patch_attr))
        stack.enter_context(patch.object(TritonSemantic, "cast", cast_others))
        stack.enter_context(patch.object(TritonSemantic, "computation_type_impl", common_type))
        stack.enter_context(patch.object(TritonSemantic, "scalar_constant", make_constant))
        stack.enter_context(patch.object(TritonSemantic, "broadcast_impl_value", broadcast_others))
        stack.enter_context(patch.object(interpreter, "_get_np_dtype", np_dtype))
        yield
