"""Choose between an operation's two versions: Triton for tensors on a GPU, the reference for all others.

Triton's kernels compute in at most float32 and have no gradients, so float64 tensors and everything that is trained use
the reference on every device. So does ``torch.compile``, which fuses the reference itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def dispatched(reference: F) -> F:
    """Call ``reference.x.name`` for CPU and float64 tensors, ``ops.x.name`` for others. Arguments decide, positional or
    by name: tensors, members of tuples, and fields of dataclasses."""
    module = reference.__module__.replace(".reference.", ".ops.")

    @functools.cache
    def kernel() -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(import_module(module), reference.__name__)
        return found

    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        decide = (*args, *kwargs.values()) if kwargs else args
        return (kernel() if runs_triton(_tensors(decide)) else reference)(*args, **kwargs)

    return cast(F, call)


def runs_triton(tensors: Iterable[Tensor]) -> bool:
    """Return whether the Triton version serves these tensors."""
    if torch.compiler.is_compiling():
        return False
    found = False
    for tensor in tensors:
        if not on_gpu(tensor.device) or tensor.dtype == torch.float64:
            return False
        if tensor.requires_grad and torch.is_grad_enabled():
            return False
        found = True
    return found


def on_gpu(device: torch.device) -> bool:
    """Return whether tensors there are served as on a GPU. So are those on ``meta``, in the dry run that finds the
    kernels to compile."""
    return device.type in ("cuda", "meta")


def _tensors(args: tuple[Any, ...]) -> Iterable[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, tuple):
            for member in arg:
                if isinstance(member, Tensor):
                    yield member
        elif hasattr(arg, "__dataclass_fields__"):
            yield from _tensors(tuple(getattr(arg, name) for name in arg.__dataclass_fields__))
