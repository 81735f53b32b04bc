"""Tenants are told apart by the key of each call."""

from __future__ import annotations

import asyncio
from typing import Any

from specserve.server.front import TENANT
from specserve.server.middleware import Tenants


def test_a_call_without_a_key_is_nobody_s() -> None:
    """Though one with a key came before it in the same context, as on a connection."""
    found: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(TENANT.get())

    async def call(*headers: tuple[bytes, bytes]) -> None:
        await Tenants(app)({"type": "http", "headers": headers}, None, None)  # type: ignore[arg-type]

    async def calls() -> None:
        await call((b"authorization", b"Bearer a"))
        await call((b"x-api-key", b"b"))
        await call()
        await call((b"authorization", b"Bearer a"))

    asyncio.run(calls())
    assert found[0]
    assert found[0] == found[3]
    assert found[1] not in ("", found[0])
    assert found[2] == ""
