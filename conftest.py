"""For all tests: kernels run under Triton's interpreter where there is no GPU. Tests that need one are skipped, and
those marked slow unless ``--slow`` is given."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.bounds import bounds_are_checked
from tests.interpreter import types_are_remembered

LONGEST = (
    "test_ops_compile",
    "test_compile",
    "test_lossless",
    "test_triton_engine",
    "test_each_method",
    "test_weight_formats",
    "test_conformance",
    "test_faults",
    "test_constrained",
    "test_called",
    "test_grammar",
    "test_targets",
    "test_load",
    "test_benchmarks",
    "test_ops_packed_linear",
    "test_ops_attention",
    "test_process",
    "test_dynamic_map",
    "test_adaptive",
    "test_ops_sampling",
    "test_ops_tree",
    "test_toys",
)
"""Files that run first, so that all processes end at about the same time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no":
        return  # this process hands out tests to others, which wait until it has imported what it needs
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
    config.pluginmanager.import_plugin("tests.fixtures")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Importing tests makes no garbage, only many objects, which would be looked through time and again. Nor do tests
    make much."""
    gc.disable()
    found = yield
    gc.enable()
    gc.set_threshold(20_000, 20, 20)
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    reasons = {} if torch.cuda.is_available() else {"gpu": "needs a CUDA device"}
    if not config.getoption("slow"):
        reasons["slow"] = "needs --slow"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_frozen() -> None:
    """Imported modules stay: a collection of garbage need not look through them, which takes 0.6 s at each engine's
    start."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # Triton would report as leaked what is out of garbage collection when this process ends


@pytest.fixture(scope="session", autouse=True)
def faster_interpreter() -> Iterator[None]:
    """Triton's interpreter replaces its language's builtins when a kernel is launched, and all over again whenever the
    kernel calls a function, which takes up to half of its time. Here they are replaced once, until the last test. Nor
    does it look for overflows of 32 bits, which takes a third of the rest and finds none at the sizes of tests. Nor
    does it make types anew: see ``types_are_remembered``. But it does check where kernels read and write."""
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    patch_lang = interpreter._patch_lang
    replaced: set[int] = set()
    scopes: list[Any] = []
    kept = SimpleNamespace(restore=lambda: None)

    @cache
    def languages_of(module: str) -> frozenset[int]:
        named = vars(sys.modules[module]).values()
        return frozenset(
            id(each) for each in (language, language.core) if any(each is name for name in named)
        )

    def replace_once(fn: Any) -> Any:
        languages = languages_of(fn.__globals__["__name__"])
        if not languages <= replaced:
            replaced.update(languages)
            scopes.append(patch_lang(fn))
        return kept

    builder = interpreter.interpreter_builder
    unchecked = replace(builder.options, sanitize_overflow=False)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # elsewhere the compiler uses the same types
    with (
        patch.object(interpreter, "_patch_lang", replace_once),
        patch.object(builder, "options", unchecked),
        types_are_remembered() if interpreted else nullcontext(),
        bounds_are_checked() if interpreted else nullcontext(),
    ):
        yield
        for scope in reversed(scopes):
            scope.restore()


@pytest.fixture(scope="session", autouse=True)
def interpreter_rounds_to_fp8() -> Iterator[None]:
    """Triton's interpreter rounds 127 to 64 in FP8, because it drops the carry into the exponent. Let PyTorch round."""
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    import torch

    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (language.float32, language.float8e4nv):
            return convert(data, source, target, rounding)
        values = torch.from_numpy(data.view("float32").copy()).to(torch.float8_e4m3fn)
        return values.view(torch.uint8).numpy()

    with patch.object(interpreter, "_convert_float", rounded):
        yield
