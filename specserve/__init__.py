"""An OpenAI-compatible LLM server with lossless speculative decoding.

``LLM`` and ``SamplingParams`` load on first use, so that importing the package stays cheap.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if (
    sys.argv[:1] == ["-m"]
    and sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] == __name__
    and callable(signal.getsignal(signal.SIGINT))
):  # a command: until its ``main``, Ctrl-C would be raised in imports, some of which swallow it
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from specserve.version import __version__

if TYPE_CHECKING:
    from specserve.core import SamplingParams, Speculation
    from specserve.llm import LLM, AsyncLLM
    from specserve.outputs import CompletionOutput, FunctionCall, RequestOutput

_HOME = {
    **dict.fromkeys(("LLM", "AsyncLLM"), "specserve.llm"),
    **dict.fromkeys(("CompletionOutput", "FunctionCall", "RequestOutput"), "specserve.outputs"),
    **dict.fromkeys(("SamplingParams", "Speculation"), "specserve.core"),
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "FunctionCall",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'specserve' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
