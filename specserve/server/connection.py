"""One client's connection, cut when its reader stops."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

STALLED = (
    60.0  # seconds between looks: who took nothing from one to the next, though something waited, is gone
)


class Connection(H11Protocol):
    """uvicorn's, which would wait for ever until what is written is read. Whatever is under way for the connection
    sees it as closed by the client."""

    _look: asyncio.TimerHandle

    def connection_made(self, transport: Any) -> None:
        self._writer = _Counted(transport)
        super().connection_made(self._writer)  # type: ignore[arg-type]
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def _look_later(self) -> None:
        self._look = self.loop.call_later(STALLED, self._check, self._writer.waiting, self._writer.taken)

    def _check(self, waited: int, taken: int) -> None:
        """``waited`` bytes were waiting at the last look, ``taken`` had been read."""
        if waited and self._writer.taken == taken:
            self._writer.abort()
        else:
            self._look_later()


class _Counted:
    """A transport that knows how much of what was written has been taken."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._written = 0

    def write(self, data: bytes) -> None:
        self._written += len(data)
        self._transport.write(data)

    @property
    def waiting(self) -> int:
        """Bytes that the client's machine has not acknowledged, here and in the kernel, which may hold megabytes."""
        held = bytearray(4)
        with contextlib.suppress(OSError):  # not every system can say
            fcntl.ioctl(self.get_extra_info("socket").fileno(), termios.TIOCOUTQ, held)
        return self._transport.get_write_buffer_size() + int.from_bytes(held, sys.byteorder)

    @property
    def taken(self) -> int:
        return self._written - self.waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
