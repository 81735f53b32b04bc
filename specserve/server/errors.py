"""Report every error in OpenAI's format, or in Anthropic's for its API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from specserve.core import FieldError
from specserve.frontend.fields import explain
from specserve.frontend.generation import RequestFailed
from specserve.logs import REQUEST_ID
from specserve.messages import Fault
from specserve.server import schema

_FAULTS: Mapping[Fault, tuple[int, str | None]] = {
    "request": (400, None),
    "server": (500, None),
    "unavailable": (503, "not_ready"),
    "timeout": (504, "timeout"),
    "aborted": (400, "aborted"),
}
HEADER = "x-request-id"
ANTHROPIC = "/v1/messages"  # prefix of the routes of its API
_KINDS: Mapping[int, schema.AnthropicKind] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
RETRY_AFTER = {429: 1, 503: 5}  # seconds after which a client should retry


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self._headers = {**(headers or {})}
        if status in RETRY_AFTER:
            self._headers["retry-after"] = str(RETRY_AFTER[status])

    @property
    def body(self) -> schema.Error:
        kind: schema.Kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "requests"
        return schema.Error(schema.Fault(_encodable(str(self)), kind, _encodable(self.param), self.code))

    @property
    def anthropic_body(self) -> schema.AnthropicError:
        """Return the error for Anthropic's clients, which know an overflow by its words, others by their type."""
        kind = _KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        words = "prompt is too long: " if self.code == "context_length_exceeded" else ""
        details = schema.ThreadDetails() if self.param == "thread" else msgspec.UNSET
        return schema.AnthropicError(schema.AnthropicFault(kind, words + _encodable(str(self)), details))

    def response(self, path: str) -> Response:
        """Return the response; ``path`` is the path of the request."""
        body = self.anthropic_body if path.startswith(ANTHROPIC) else self.body
        return Response(msgspec.json.encode(body), self.status, self._headers, "application/json")


class BodyError(HTTPException):
    """A field that is refused while the body is read; FastAPI passes no other exception through there."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(400, message)
        self.param = param


def add_handlers(app: FastAPI) -> None:
    """Make every error of the app, the framework's own too, answer in the format of the API that was called."""

    async def answer(request: Request, error: Exception) -> Response:
        return as_answer(error, request).response(request.url.path)

    for kind in (ApiError, FieldError, RequestFailed, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def as_answer(error: Exception, request: Request | None = None) -> ApiError:
    """Return the response for an exception."""
    match error:
        case ApiError():
            return error
        case FieldError():
            return ApiError(400, str(error), error.param, error.code)
        case RequestFailed():
            status, code = _FAULTS[error.fault]
            return ApiError(status, str(error), error.param, code)
        case RequestValidationError():
            return _from_validation(error.errors())
        case HTTPException():
            return _from_http(error, request)
    words = f"internal error: {type(error).__name__}; the server's log has more"
    return ApiError(500, words, headers={HEADER: REQUEST_ID.get() or ""})  # sent from outside all middleware


def _encodable(text: str | None) -> Any:
    """Make a text encodable: a request may hold half a surrogate pair, which UTF-8 can't encode, and an error may quote
    it."""
    return text and text.encode(errors="backslashreplace").decode()


def _from_http(error: HTTPException, request: Request | None) -> ApiError:
    asked = f"{request.method} {request.url.path}" if request else ""
    near = _near(request) if request and error.status_code == 404 else None
    hint = "" if near is None else f"; did you mean {near}?"
    messages = {404: f"unknown route: {asked}{hint}", 405: f"method not allowed: {asked}"}
    param = error.param if isinstance(error, BodyError) else None
    words = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, words, param, headers=error.headers)  # the allowed methods


def _near(request: Request) -> str | None:
    """Return the route that a path without its version, with two or with a slash at its end stands for."""
    path = "/v1/" + request.url.path.strip("/").removeprefix("v1/").removeprefix("v1/")
    known = {getattr(route, "path", "") for route in request.app.routes}
    return next((each for each in (path, path.removeprefix("/v1")) if each in known), None)


def _from_validation(errors: Sequence[Any]) -> ApiError:
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    inside = [{**error, "loc": error["loc"][1:]} for error in errors]  # without "body"
    if not inside[0]["loc"] and "param" not in first.get("ctx", {}):
        if first["type"] == "string_unicode" and isinstance(first["input"], str):
            return ApiError(400, f"{first['input']}: unknown field", first["input"], "unknown_parameter")
        return ApiError(400, "the body must be a JSON object, sent with content-type application/json")
    return as_answer(explain(inside))
