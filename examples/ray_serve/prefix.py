"""Which replica should answer? The one whose prefix cache has the prompt's beginning, unless it has too much to do.

Nothing here knows of Ray.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Hashable, Mapping
from typing import Any, TypeVar

T = TypeVar("T", bound=Hashable)

PREFIX = 512  # characters of a prompt that decide
SPARE = 1.25  # a replica has too much to do beyond this many times the average
SLACK = 4  # ... and this many requests more: few requests go where their prefix is, however uneven


def prefix_of(body: bytes) -> str:
    """What a request's prompt begins with; bodies that a server would refuse have some prefix, too.

    Of a chat that is all up to the first message of the user's, so that a conversation stays where it began.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # not JSON, not text, too deep
        fields = None
    if not isinstance(fields, dict):
        return ""
    beginning = _first_turn(fields["messages"]) if "messages" in fields else fields.get("prompt")
    text = beginning if isinstance(beginning, str) else json.dumps(beginning)
    return f"{fields.get('prompt_cache_key') or ''}\n{text[:PREFIX]}"


def _first_turn(messages: Any) -> Any:
    if not isinstance(messages, list):
        return messages
    for index, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            return messages[: index + 1]
    return messages


def rank(prefix: str, loads: Mapping[T, int], avoid: Collection[T] = ()) -> list[T]:
    """Replicas, the best first. ``loads``: the requests that each has; ``avoid``: those that could not answer.

    Rendezvous hashing with bounded loads: each replica draws a number for a prefix, the highest has it. When a replica
    comes or goes, only its own prefixes move. Those with too much to do come after the others, the idlest first, and
    those to avoid last.
    """
    bound = math.ceil(SPARE * (sum(loads.values()) + 1) / max(len(loads), 1)) + SLACK

    def order(replica: T) -> tuple[bool, int, int]:
        load = loads[replica]
        return replica in avoid, load if load >= bound else 0, -_draw(prefix, replica)

    return sorted(loads, key=order)


def _draw(prefix: str, replica: Hashable) -> int:
    """The same in every process."""
    digest = hashlib.blake2b(f"{replica}\n{prefix}".encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest())
