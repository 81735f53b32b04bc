"""Follow launches on Triton's interpreter, which tells where each reads and writes: what a kernel reads before its turn
was not written by the launch right before it, which may still run. See ``specserve_kernels.ops.pdl``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bounds import ADDRESS

ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Launches(TorchDispatchMode):
    """Follow launches. ``early`` are the pairs of kernels of which the second reads too early, ``pairs`` all that come
    right after each other, ``reads`` how many numbers are read before a turn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.early, self.pairs = set[tuple[str, str]](), set[tuple[str, str]]()
        self.reads = 0
        self._before = ""  # the launch before, empty if it is PyTorch's
        self._written = list[Any]()  # where that launch wrote
        self._inside = self._settled = False
        self._reads, self._writes = list[Any](), list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """PyTorch's kernels begin when all before them have ended, and let none begin early. Views are no launches."""
        found = func(*args, **(kwargs or {}))
        if not self._inside and not func.is_view and func.overloadpacket.__name__ not in ALLOCATES:
            self._before, self._written = "", []
        return found

    @contextmanager
    def launch(self, name: str) -> Iterator[None]:
        self._inside, self._reads, self._writes = True, [], []
        yield
        self._inside = False
        self.reads += sum(map(np.size, self._reads))
        self.pairs.add((self._before, name))
        if self._reads and self._written:
            written = [pointers[mask] for pointers, mask in self._written]
            if np.isin(np.concatenate(self._reads), np.concatenate(written)).any():
                self.early.add((self._before, name))
        self._before, self._written = name, self._writes

    @contextmanager
    def early_loads(self) -> Iterator[None]:
        self._settled = True
        yield
        self._settled = False

    def read(self, pointers: Any, mask: Any) -> None:
        if self._settled:
            self._reads.append(pointers.data[mask.data] & ADDRESS)

    def write(self, pointers: Any, mask: Any) -> None:
        self._writes.append((pointers.data & ADDRESS, mask.data))


@contextmanager
def followed() -> Iterator[Launches]:
    """The launches of what runs inside."""
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder

    launches = Launches()
    run, call = GridExecutor.__call__, InterpretedFunction.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        with launches.launch(self.fn.__name__):
            run(self, *args, **kwargs)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        with launches.early_loads() if self.fn.__name__ == "load_settled" else nullcontext():
            return call(self, *args, **kwargs)

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        launches.read(pointers, mask)
        return load(self, pointers, mask, *rest, **named)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        launches.write(pointers, mask)
        return store(self, pointers, value, mask, *rest, **named)

    with ExitStack() as stack:
        for owner, name, new in (
            (GridExecutor, "__call__", launch),
            (InterpretedFunction, "__call__", called),
            (InterpreterBuilder, "create_masked_load", loaded),
            (InterpreterBuilder, "create_masked_store", stored),
        ):
            stack.enter_context(patch.object(owner, name, new))
        stack.enter_context(launches)
        yield launches
