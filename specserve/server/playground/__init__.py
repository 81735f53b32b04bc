"""The playground: a page at ``/`` that chats with the server and shows which tokens were drafts.

Its files contain no secrets and load nothing from elsewhere, so they need no API key. The API that they call does.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

from specserve.server.errors import ApiError

_FOLDER = Path(__file__).parent
_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
FILES = {file.name: file for file in sorted(_FOLDER.iterdir()) if file.suffix in _TYPES}
PATHS = ("/", *(f"/playground/{name}" for name in FILES))


def add_playground(app: FastAPI) -> None:
    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def get_page() -> Response:
        return _serve("index.html")

    @app.get("/playground/{name}", include_in_schema=False)
    async def get_file(name: str) -> Response:
        if name not in FILES:
            raise ApiError(404, f"the playground has no file {name!r}")
        return _serve(name)


def _serve(name: str) -> Response:
    file = FILES[name]
    return Response(file.read_bytes(), media_type=_TYPES[file.suffix], headers=HEADERS)
