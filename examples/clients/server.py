"""Where the server is: the variables that OpenAI's client reads, or else the address that `make serve` listens on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from openai import APIConnectionError


def connection() -> dict[str, str]:
    """Arguments of ``OpenAI`` and ``AsyncOpenAI``. A server without `--api-key` takes any key."""
    return {
        "base_url": os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:30000/v1"),
        "api_key": os.environ.get("OPENAI_API_KEY", "none"),
    }


@contextlib.contextmanager
def reached() -> Iterator[None]:
    """Ends the program with a line, where there is no server."""
    try:
        yield
    except APIConnectionError as error:
        raise SystemExit(f"no server answers at {connection()['base_url']}: {error}") from None
