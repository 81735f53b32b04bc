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
    constants and the types that two types give together; and calls and results are checked by nobody in between.
    Operands that together need no cast are looked at once, too, and NumPy broadcasts them while it computes."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    make_type = core.block_type.__init__
    broadcast, check = TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl
    find_np_dtype = interpreter._get_np_dtype
    cast, common = TritonSemantic.cast, TritonSemantic.computation_type_impl
    constant, semantic = TritonSemantic.scalar_constant, interpreter.interpreter_semantic
    constants: dict[tuple[str, str], Any] = {}
    commons: dict[tuple[object, ...], Any] = {}
    blocks: dict[tuple[object, ...], dict[str, Any]] = {}
    np_dtypes: dict[str, Any] = {}
    uncast: set[tuple[object, ...]] = set()
    operands: dict[tuple[object, ...], Any] = {}
    shapes: dict[tuple[int, int], Any] = {}
    types: dict[tuple[str, int], Any] = {}
    unwrap, plain = core._unwrap_if_constexpr, {core.tensor, core.dtype, int, bool, float, type(None)}
    lazily = False

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(prod(sizes))

    scalar = shape_of(())

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_type(self, element_ty, shape)
            blocks[key] = {**vars(self), "shape_and_numel": shape_of(key[1:])}
        vars(self).update(blocks[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = getattr(type, "shape_and_numel", scalar)

    def block_of(element_ty: Any, shape: Any) -> Any:
        if element_ty.__class__ is not core.dtype:
            return core.block_type(element_ty, [size.value for size in shape])
        key = element_ty.name, id(shape)  # which stays, as ``shape_of`` remembers it
        if key not in types:
            types[key] = core.block_type(element_ty, [size.value for size in shape])
        return types[key]

    def with_element(self: Any, element_ty: Any) -> Any:
        return block_of(element_ty, self.shape_and_numel[0])

    def unwrap_others(value: Any) -> Any:
        return value if value.__class__ in plain else unwrap(value)

    def shaped(value: Any, shape: Any) -> Any:
        return value if value.shape is shape else core.tensor(value.handle, block_of(value.dtype, shape))

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not lazily:
            return broadcast(self, lhs, rhs)
        key = id(lhs.shape), id(rhs.shape)
        if key not in shapes:
            shapes[key] = broadcast(self, lhs, rhs)[0].shape
        return shaped(lhs, shapes[key]), shaped(rhs, shapes[key])

    def check_others(self: Any, lhs: Any, rhs: Any, *rest: Any, **named: Any) -> Any:
        """Of an operation whose result NumPy gives its shape."""
        nonlocal lazily
        one, other = lhs.__class__ is core.tensor, rhs.__class__ is core.tensor
        how = rest, *named.items()
        if not one and not other:
            return check(self, lhs, rhs, *rest, **named)
        key: tuple[object, ...]
        if one and other:
            key = lhs.dtype.name, rhs.dtype.name, how
        elif one:
            key = lhs.dtype.name, id(lhs.shape), repr(rhs), how
            if key in operands:
                return lhs, operands[key]
        else:
            key = repr(lhs), rhs.dtype.name, id(rhs.shape), how
            if key in operands:
                return operands[key], rhs
        lazily = True
        try:
            if key in uncast:
                return broadcast_others(self, lhs, rhs)
            left, right = check(self, lhs, rhs, *rest, **named)
        finally:
            lazily = False
        if one and other:
            if left.handle is lhs.handle and right.handle is rhs.handle:
                uncast.add(key)
        elif left is lhs:
            operands[key] = right
        elif right is rhs:
            operands[key] = left
        return left, right

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
        stack.enter_context(patch.object(core.block_type, "with_element_ty", with_element))
        stack.enter_context(patch.object(core, "_unwrap_if_constexpr", unwrap_others))
        stack.enter_context(patch.object(core.tensor, "__init__", init_tensor))
        stack.enter_context(patch.object(interpreter.TensorHandle, "__init__", init_handle))
        stack.enter_context(patch.object(interpreter, "_patch_attr", patch_attr))
        stack.enter_context(patch.object(TritonSemantic, "cast", cast_others))
        stack.enter_context(patch.object(TritonSemantic, "computation_type_impl", common_type))
        stack.enter_context(patch.object(TritonSemantic, "scalar_constant", make_constant))
        stack.enter_context(patch.object(TritonSemantic, "broadcast_impl_value", broadcast_others))
        stack.enter_context(patch.object(TritonSemantic, "binary_op_type_checking_impl", check_others))
        stack.enter_context(patch.object(interpreter, "_get_np_dtype", np_dtype))
        yield
