"""Errors in OpenAI's shape, whatever went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from specserve.core import FieldError
from specserve.frontend.fields import explain
from specserve.frontend.generation import RequestFailed
from specserve.logs import REQUEST_ID
from specserve.messages import Fault
from specserve.server.request_ids import HEADER

_FAULTS: Mapping[Fault, tuple[int, str | None]] = {
    "request": (400, None),
    "server": (500, None),
    "unavailable": (503, "not_ready"),
    "timeout": (504, "timeout"),
    "aborted": (400, "aborted"),
}
RETRY_AFTER = {429: 1, 503: 5}  # seconds after which it is worth while to ask again


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, _encodable(str(self)), _encodable(self.param), self.code)

    @property
    def response(self) -> JSONResponse:
        wait = RETRY_AFTER.get(self.status)
        headers = None if wait is None else {"retry-after": str(wait)}
        return JSONResponse(self.body, self.status, headers)


class BodyError(HTTPException):
    """A field that is refused while the body is read: FastAPI lets no other exception through there."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(400, message)
        self.param = param


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = "requests" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def from_failure(failure: RequestFailed) -> ApiError:
    status, code = _FAULTS[failure.fault]
    return ApiError(status, str(failure), failure.param, code)


def add_handlers(app: FastAPI) -> None:
    """Makes every error of the app, the framework's own too, answer in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def api(_: Request, error: ApiError) -> JSONResponse:
        return error.response

    @app.exception_handler(RequestFailed)
    async def failed(_: Request, error: RequestFailed) -> JSONResponse:
        return from_failure(error).response

    @app.exception_handler(FieldError)
    async def field(_: Request, error: FieldError) -> JSONResponse:
        return from_field(error).response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return _from_validation(error.errors()).response

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        response = _from_http(request, error).response
        response.headers.update(error.headers or {})  # which methods are allowed
        return response

    @app.exception_handler(Exception)
    async def internal(_: Request, error: Exception) -> JSONResponse:
        response = ApiError(
            500, f"internal error: {type(error).__name__}; the server's log has more"
        ).response
        response.headers[HEADER] = REQUEST_ID.get() or ""  # it is made outside of all other layers
        return response


def _encodable(text: str | None) -> Any:
    """Requests may hold half a surrogate pair, which UTF-8 can't say; an error that names it can."""
    return text and text.encode(errors="backslashreplace").decode()


def _from_http(request: Request, error: HTTPException) -> ApiError:
    asked = f"{request.method} {request.url.path}"
    messages = {404: f"unknown route: {asked}", 405: f"method not allowed: {asked}"}
    param = error.param if isinstance(error, BodyError) else None
    return ApiError(error.status_code, messages.get(error.status_code, str(error.detail)), param)


def _from_validation(errors: Sequence[Any]) -> ApiError:
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    inside = [{**error, "loc": error["loc"][1:]} for error in errors]  # the body
    if not inside[0]["loc"] and "param" not in first.get("ctx", {}):
        if first["type"] == "string_unicode" and isinstance(first["input"], str):
            return ApiError(400, f"{first['input']}: unknown field", first["input"], "unknown_parameter")
        return ApiError(400, "the body must be a JSON object, sent with content-type application/json")
    return from_field(explain(inside))


def from_field(error: FieldError) -> ApiError:
    return ApiError(400, str(error), error.param, error.code)
