"""Check on Triton's interpreter that kernels read and write only where their tensors lie. A GPU says that an address is
illegal only if nothing else of the process lies there, and then tells neither the kernel nor the line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

_BITS = 48  # of an address: pointers have their argument's number above them, and keep it in sums
ADDRESS = np.uint64((1 << _BITS) - 1)


class OutOfBounds(Exception):
    """A kernel reads or writes outside of the tensor from whose pointer it computed the address."""


class Launch:
    """The tensors of a launch, by number. Pointers that a kernel reads from a tensor have none and are not checked."""

    def __init__(self, kernel: str) -> None:
        self._kernel, self._tensors = kernel, list[tuple[int, int, Any]]()

    def number(self, tensor: Any) -> np.uint64:
        """Return the bits that mark a tensor's pointers."""
        own = len(self._tensors) + 1 << _BITS
        last = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
        first = own + tensor.data_ptr()
        self._tensors.append((first, first + last * tensor.element_size() if tensor.numel() else -1, tensor))
        return np.uint64(own)

    def check(self, used: Any) -> None:
        """Raise OutOfBounds if one of these pointers lies outside of its tensor."""
        low, high = (used.item(),) * 2 if used.size == 1 else (int(used.min()), int(used.max()))
        if (number := low >> _BITS) != high >> _BITS:
            for each in np.unique(used >> np.uint64(_BITS)):
                self.check(used[used >> np.uint64(_BITS) == each])
        elif number:
            first, last, tensor = self._tensors[number - 1]
            if low < first or high > last:
                lines, frame = list[str](), sys._getframe(1)
                while (frame := frame.f_back) is not None:  # type: ignore[assignment]
                    path = Path(frame.f_code.co_filename)
                    lines += [f"{path.name}:{frame.f_lineno}"] if "ops" in path.parts else []
                found = " to ".join(f"{(each - first) / tensor.element_size():g}" for each in (low, high))
                given = f"argument {number} {tensor.dtype} {[*tensor.shape]} {[*tensor.stride()]}"
                raise OutOfBounds(f"{self._kernel} at {' < '.join(lines[:3])}: elements {found} of {given}")


@contextmanager
def bounds_are_checked() -> Iterator[None]:
    """Let launches inside raise OutOfBounds. Arguments are counted from 1, tensors alone."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    run, convert = executor.__call__, interpreter._implicit_cvt
    launches: list[Launch] = []

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(Launch(self.fn.__name__))
        try:
            run(self, *args, **kwargs)
        except interpreter.InterpreterError as error:
            raise (error.__cause__ if isinstance(error.__cause__, OutOfBounds) else error) from None
        finally:
            launches.pop()

    def converted(arg: Any) -> Any:
        made = convert(arg)
        if launches and hasattr(arg, "data_ptr"):
            made.handle.data = made.handle.data | launches[-1].number(interpreter._unwrap_tensor(arg))
        return made

    def checked(name: str, pointer: int, mask: int | None) -> Any:
        inner = getattr(builder, name)

        def call(self: Any, *args: Any, **named: Any) -> Any:
            given, pointers = [*args], args[pointer]
            used = pointers.data if mask is None else pointers.data[args[mask].data]
            if used.size:
                launches[-1].check(used)
            given[pointer] = interpreter.TensorHandle(pointers.data & ADDRESS, pointers.dtype)
            return inner(self, *given, **named)

        return call

    with ExitStack() as stack:
        for owner, name, new in (
            (executor, "__call__", launch),
            (interpreter, "_implicit_cvt", converted),
            (builder, "create_masked_load", checked("create_masked_load", 0, 1)),
            (builder, "create_masked_store", checked("create_masked_store", 0, 2)),
            (builder, "create_atomic_cas", checked("create_atomic_cas", 0, None)),
            (builder, "create_atomic_rmw", checked("create_atomic_rmw", 1, 3)),
        ):
            stack.enter_context(patch.object(owner, name, new))
        yield
