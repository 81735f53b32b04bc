"""What a kernel reads before its turn was not written by the launch right before it, which may still run: see
``specserve_kernels.ops.pdl``. Engines run on Triton's interpreter, which tells where each launch reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from specserve.core import SamplingParams
from tests.engines import Checkpoints, answer_all
from tests.test_triton_engine import on_triton  # noqa: F401, a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

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
        if (
            self._reads
            and self._written
            and np.isin(np.concatenate(self._reads), np.concatenate(self._written)).any()
        ):
            self.early.add((self._before, name))
        self._before, self._written = name, self._writes

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """A function that a kernel calls."""
        self._settled = name == "load_settled"
        yield
        self._settled = False

    def read(self, pointers: Any, mask: Any) -> None:
        if self._settled:
            self._reads.append(pointers.data[mask.data])

    def write(self, pointers: Any, mask: Any) -> None:
        self._writes.append(pointers.data[mask.data])


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
        with launches.call(self.fn.__name__):
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


@pytest.mark.parametrize(
    ("algorithm", "branching"),
    [("EAGLE3", 2), ("MEDUSA", 1), ("DFLASH", 2), ("P_EAGLE+NGRAM", 1)],
)
@pytest.mark.usefixtures("on_triton")
def test_nothing_is_read_before_it_is_written(
    algorithm: str, branching: int, agreeing_32: Checkpoints
) -> None:
    scheduler = agreeing_32.scheduler(algorithm, (2, branching, 3 * branching), dtype="float32")
    prompts = [[3, 9, 27, 17], [1, 2, 1]]
    params = [SamplingParams(temperature=heat, seed=1, max_tokens=5) for heat in (0, 0.8)]
    with followed() as launches:
        answer_all(scheduler, zip(prompts, params, strict=True))
    assert not launches.early
    assert launches.reads > 100
    assert ("_scan", "_finish") in launches.pairs
    # Drafters that score all levels at once: in chains the sampler comes right after the level's tokens are written.
    at_once = branching == 1 and algorithm != "EAGLE3"
    assert (("_grow_kernel", "_scan") in launches.pairs) == at_once
