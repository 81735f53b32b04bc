"""Checks of single settings: each returns what is wrong with a value, as ``declare.Check`` does, or None."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from specserve.config.declare import Check
from specserve.methods import MAX_NODES


def only(words: str, accepts: Callable[[Any], bool]) -> Check:
    """Return a check that refuses all values but those described by ``words``."""
    return lambda value: None if accepts(value) else f"must be {words}, found {value}"


# With lower values SGLang accepts likely drafts, and so changes the text.
lossless = only("1, because speculation never changes the text here", lambda value: value == 1)
page = only("a power of two from 1 to 256", lambda size: size in (2**n for n in range(9)))


def cores(threads: int) -> str | None:
    most = os.cpu_count() or threads
    return None if threads <= most else f"must be at most {most}, the cores of this machine, found {threads}"


def sendable(keys: tuple[str, ...]) -> str | None:
    """Refuse a key that a header can't carry unchanged, such as non-ASCII text, and NAME= alone. A random key in base64
    may end in = too, but is longer than most names."""
    if any(re.fullmatch("[A-Za-z][A-Za-z0-9_.-]{0,19}=+", key.strip()) for key in keys):
        return "must not be NAME= without a key"
    good = all(key.isascii() and key.strip().isprintable() for key in keys)
    return None if good else "must be printable ASCII, as it is sent in a header"


def collector(address: str) -> str | None:
    good = re.fullmatch("(grpc://)?[^/]+:[0-9]+|https?://[^/].*", address)
    return None if good else f"must be like grpc://HOST:4317 or http://HOST:4318/v1/traces, found {address!r}"


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]+)?")
_DEFAULT_PORT = re.compile(r"http://.*:80|https://.*:443")


def origins(given: tuple[str, ...]) -> str | None:
    """Refuse origins that no browser sends, because they would never match."""
    for origin in given:
        sent = _ORIGIN.fullmatch(origin) and not _DEFAULT_PORT.fullmatch(origin)
        if not sent and origin not in ("*", "null"):
            return (
                "must be * or what browsers send, like https://example.com:8443: in lower case, without a path, a user "
                f"or the scheme's own port, found {origin!r}"
            )
    return None


def once(names: tuple[str, ...]) -> str | None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    return f"must name each model once, found {twice[0]!r} again" if twice else None


def acceptance(text: str) -> str | None:
    words = "must be one number from 1 on, or numbers from 0 to 1 separated by commas"
    try:
        given = [float(each) for each in text.split(",")]
    except ValueError:
        return f"{words}, found {text!r}"
    good = all(0 <= each <= 1 for each in given) or (len(given) == 1 and 1 <= given[0] <= MAX_NODES)
    return None if good else f"{words}, found {text!r}"


def json_object(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"must be a JSON object: {error}"
    return None if isinstance(value, dict) else f"must be a JSON object, found {text}"
