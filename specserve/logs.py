"""Logging of both processes: one line per message on standard error, as text or as JSON."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the HTTP request being answered."""


def configure_logging(level: str, form: str = "text") -> None:
    """Set up logging; ``form`` is ``text`` or ``json``. Python's warnings are logged too."""
    handler = logging.StreamHandler()
    handler.setLevel(level.upper())  # filters also libraries' loggers that set their own level
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for noisy in ("httpx", "httpx2", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.captureWarnings(True)


def adopt_loggers() -> None:
    """Send the logs of libraries imported so far that print on their own to the root handler."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if not isinstance(logger, logging.Logger):
            continue
        for handler in [found for found in logger.handlers if type(found) is logging.StreamHandler]:
            logger.removeHandler(handler)
            logger.propagate = True


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(request)s%(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        name = REQUEST_ID.get()
        record.request = "" if name is None else f"[{name}] "
        return super().format(record)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "module": record.name,
            "message": record.getMessage(),
        }
        if (name := REQUEST_ID.get()) is not None:
            found["request_id"] = name
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)
