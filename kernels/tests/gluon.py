"""Run a module of Gluon kernels on a CPU, with torch, as Triton's interpreter does not.

Layouts mean nothing here, copies and products are done when they are asked for, and programs run one after another;
specialized warps are threads. Shared memory begins as NaN, and an access outside a tensor is an error.
"""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Pointer:
    def __init__(self, numbers: Tensor, offset: Any = 0) -> None:
        self.numbers, self.offset = numbers, torch.as_tensor(offset)
        self.dtype = SimpleNamespace(element_ty=numbers.dtype)

    shape = property(lambda self: self.offset.shape)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.numbers, self.offset + torch.as_tensor(offset).long())

    def __sub__(self, offset: int) -> Pointer:
        return self + -offset

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.numbers, self.offset[index])

    def at(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return offsets, 0 where masked, and the mask."""
        live = torch.ones_like(self.offset, dtype=torch.bool)
        live = live if mask is None else torch.as_tensor(mask).expand_as(live)
        where = torch.where(live, self.offset, 0)
        assert ((where >= 0) & (where < len(self.numbers))).all()
        return where, live


class Shared:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.dtype = tensor, tensor.dtype
        self.boxes: list[Tensor] = []

    def index(self, number: Any) -> Shared:
        return Shared(self.boxes[int(number)] if self.boxes else self.tensor[int(number)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.tensor.permute(order))

    def reinterpret(self, shape: list[int], layout: Any = None) -> Shared:
        """A table as another. Or blocks of these boxes, a block's columns of boxes one after another."""
        if self.tensor.dim() == 2:
            return Shared(self.tensor.view(shape))
        blocks, (_, rows, columns) = torch.full(shape, torch.nan, dtype=self.dtype), self.tensor.shape
        for block in blocks:
            for part in block.split(columns, 1):
                self.boxes += part.split(rows)
        return Shared(blocks)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.tensor.narrow(dim, start, length))

    def load(self, _: Any) -> Tensor:
        return self.tensor.clone()

    def store(self, value: Tensor) -> None:
        self.tensor.copy_(value)


class Barriers:
    """Those of shared memory: a phase ends when all have arrived, and the bytes that they expect."""

    MBarrierLayout = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.changed = Condition()
        self.states: dict[int, list[int]] = {}  # count, those that have not arrived, missing bytes, phase

    def init(self, bar: Shared, count: int) -> None:
        self.states[bar.tensor.data_ptr()] = [count, count, 0, 0]

    def _change(self, bar: Shared, arrived: int, missing: int) -> None:
        with self.changed:
            state = self.states[bar.tensor.data_ptr()]
            state[1] -= arrived
            state[2] += missing
            if state[1:3] == [0, 0]:
                state[1], state[3] = state[0], state[3] + 1
                self.changed.notify_all()

    def arrive(self, bar: Shared) -> None:
        self._change(bar, 1, 0)

    def expect(self, bar: Shared, missing: int) -> None:
        self._change(bar, 1, missing)

    def load_box(self, box: Box, place: list[Any], bar: Shared, into: Shared) -> None:
        row, column = map(int, place)
        held = box.tensor[row : row + box.shape[0], column : column + box.shape[1]]
        into.tensor.zero_()[: len(held)] = held
        self._change(bar, 0, -into.tensor.numel() * into.tensor.element_size())

    def wait(self, bar: Shared, parity: Any, pred: Any = True) -> None:
        if not pred:
            return
        with self.changed:
            state = self.states[bar.tensor.data_ptr()]
            assert self.changed.wait_for(lambda: state[3] & 1 != int(parity), 20), "nobody arrives"


class Box:
    def __init__(self, tensor: Tensor, shape: list[int]) -> None:
        self.tensor, self.shape, self.dtype = tensor, shape, tensor.dtype


class Constant(int):
    value = property(int)


def specialize(functions: list[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
    with ThreadPoolExecutor(len(functions)) as pool:
        for each in [pool.submit(function, *arguments) for function, arguments in functions]:
            each.result()


def load(pointer: Pointer, mask: Tensor | None = None, other: Any = 0, cache_modifier: str = "") -> Tensor:
    where, live = pointer.at(mask)
    return torch.where(live, pointer.numbers[where], torch.tensor(other or 0, dtype=pointer.numbers.dtype))


def store(pointer: Pointer, value: Any, mask: Tensor | None = None) -> None:
    where, live = pointer.at(mask)
    value = torch.as_tensor(value).to(pointer.numbers.dtype).expand_as(where)
    pointer.numbers[where[live]] = value[live]


def atomic_add(pointer: Pointer, value: Any, sem: str, scope: str) -> Tensor:
    old = load(pointer)
    store(pointer, old + value)
    return old


def allocate(dtype: torch.dtype, shape: list[int], _: Any, value: Tensor | None = None) -> Shared:
    unset = torch.nan if dtype.is_floating_point else -1
    return Shared(torch.full(shape, unset, dtype=dtype) if value is None else value.clone())


def product(
    a: Shared | Tensor, b: Shared, sums: Tensor, use_acc: bool = True, is_async: bool = False
) -> Tensor:
    a = a.tensor if isinstance(a, Shared) else a
    return a.float() @ b.tensor.float() + (sums if use_acc else 0)


def where(which: Any, a: Any, b: Any) -> Any:
    if isinstance(a, Pointer):
        return Pointer(
            torch.cat([a.numbers, b.numbers]), torch.where(which, a.offset, b.offset + len(a.numbers))
        )
    return torch.where(torch.as_tensor(which), torch.as_tensor(a), torch.as_tensor(b))


def of_tensors(function: Any) -> Any:
    """A function whose numbers become tensors of the first one's dtype."""
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b, dtype=torch.as_tensor(a).dtype))


class Plain(ast.NodeTransformer):
    """Without Gluon's imports and decorators; numbers whose bits are reinterpreted are viewed."""

    def visit_Import(self, node: ast.Import) -> Any:
        return None if node.names[0].name.startswith("triton") else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        return None if (node.module or "").startswith(("triton", "specserve_kernels.ops.linear")) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.decorator_list = []
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        if any(each.arg == "bitcast" for each in node.keywords) and isinstance(node.func, ast.Attribute):
            node.func.attr, node.keywords = "view", []
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        return ast.Constant(None) if node.attr == "layout" else self.generic_visit(node)


class Kernel:
    """Runs a launch's programs in any order."""

    def __init__(self, function: Any, gl: SimpleNamespace) -> None:
        self.function, self.gl = function, gl

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, num_warps: int, maxnreg: int | None = None, **constants: Any) -> None:
            pointers = [
                Pointer(each.as_strided((each.untyped_storage().nbytes() // each.element_size(),), (1,), 0))
                + each.storage_offset()
                if isinstance(each, Tensor)
                else each
                for each in arguments
            ]
            self.gl.num_programs = lambda axis: torch.tensor(grid[axis], dtype=torch.int32)
            programs = torch.cartesian_prod(*(torch.arange(count, dtype=torch.int32) for count in grid))
            for index in torch.randperm(len(programs), generator=torch.Generator().manual_seed(0)):
                self.gl.program_id = lambda axis, own=programs[index].view(-1): own[axis].clone()
                self.function(*pointers, **constants)

        return launch


def on_cpu(module: ModuleType, **given: Any) -> SimpleNamespace:
    """Return the module's names, of which kernels run on a CPU. ``given``: what it imports of others."""
    nothing, barriers = lambda *_, **__: None, Barriers()
    gl = SimpleNamespace(
        constexpr=lambda value: Constant(value) if type(value) is int else value,
        int32=torch.int32, int64=torch.int64, float32=torch.float32,
        arange=lambda start, end, _: torch.arange(start, end, dtype=torch.int32), load=load, store=store,
        where=where, int16=torch.int16, bfloat16=torch.bfloat16, exp=torch.exp, broadcast=torch.broadcast_tensors,
        multiple_of=lambda x, _: x, dot_fma=lambda a, b, sums: a @ b + sums,
        DotOperandLayout=nothing, DistributedLinearLayout=nothing,
        maximum=of_tensors(torch.maximum), minimum=of_tensors(torch.minimum), atomic_add=atomic_add,
        sum=lambda x, axis: x.sum(axis, dtype=x.dtype), max=lambda x, axis: x.amax(axis), ceil=torch.ceil,
        associative_scan=lambda x, axis, _: x.cumsum(axis, dtype=x.dtype), exp2=torch.exp2, static_range=range,
        full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype), allocate_shared_memory=allocate,
        fma=lambda a, b, c: (a.double() * b.double() + c.double()).float(), convert_layout=lambda x, _, **__: x.clone(),
        expand_dims=torch.unsqueeze, zeros_like=torch.zeros_like, shared_memory_descriptor=Shared,
        warp_specialize=specialize, inline_asm_elementwise=lambda *_, **__: 0,
        split=lambda x: (x[..., 0].clone(), x[..., 1].clone()), permute=torch.permute, reshape=torch.reshape,
        SliceLayout=nothing, BlockedLayout=nothing, SwizzledSharedLayout=nothing,
        NVMMADistributedLayout=nothing, NVMMASharedLayout=nothing, max_contiguous=lambda x, _: x,
        full_like=torch.full_like, join=lambda a, b: torch.stack((a, b), -1), broadcast_to=torch.broadcast_to,
    )  # fmt: skip
    names: dict[str, Any] = {
        "__name__": module.__name__, "gl": gl, "tl": gl, "ROWS_EACH": Constant(64), "barrier": nothing,
        "begin_after_last": nothing, "fence_async_shared": nothing, "warpgroup_mma": product,
        "mma_v2": lambda a, b, sums: a.float() @ b.float() + sums,
        "warpgroup_mma_wait": lambda _, waited: waited[0] if len(waited) == 1 else tuple(waited),
        "async_copy": SimpleNamespace(
            async_load=lambda into, pointer, mask=None, _="": into.store(load(pointer, mask)), mbarrier_arrive=nothing,
            commit_group=nothing, wait_group=nothing,
        ),
        "mbarrier": barriers, "load_box": barriers.load_box,
        "TensorDescriptor": SimpleNamespace(from_tensor=lambda tensor, shape, _: Box(tensor, shape)),
    }  # fmt: skip
    tree = ast.fix_missing_locations(Plain().visit(ast.parse(Path(str(module.__file__)).read_text())))
    exec(compile(tree, str(module.__file__), "exec"), names)
    names |= {"load_settled": load} | given
    names |= {name: Kernel(names[name], gl) for name in names if name.endswith("_kernel")}
    return SimpleNamespace(names=names, **{name: names[name] for name in names if not name.startswith("__")})
