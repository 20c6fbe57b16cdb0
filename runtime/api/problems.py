"""Errors as problem documents (RFC 9457) that OpenAI's clients can read too: they look at the `error` member."""

from __future__ import annotations

import http
import re
from collections.abc import Sequence
from typing import Any

import asyncpg
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from runtime.api.documented import MEDIA_TYPE
from runtime.api.request_id import HEADER, request_id
from runtime.errors import RequestError, TooManyRequests, Unavailable

_KIND = re.compile(r"str|constrained-str|(list|dict)\[.*\]")  # which of several kinds a value was taken for
_NO_OBJECT = ("missing", "model_attributes_type", "model_type", "dict_type")


def problem(status: int, code: str, message: str, param: str | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {
        "type": "about:blank",
        "title": http.HTTPStatus(status).phrase,
        "status": status,
        "detail": message,
        "request_id": request_id(),
        "error": {"message": message, "type": kind, "code": code, "param": param},
    }
    return JSONResponse(body, status, media_type=MEDIA_TYPE)


def of(error: RequestError | Unavailable) -> JSONResponse:
    """What an error that was raised on purpose says."""
    if isinstance(error, Unavailable):
        response = problem(503, "unavailable", f"{error}; try again in a moment")
        response.headers["Retry-After"] = "1"
        return response
    response = problem(error.status, error.code, str(error), error.param)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, TooManyRequests):
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def install(app: FastAPI) -> None:
    """Every error of the application leaves as a problem document."""

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> JSONResponse:
        request.state.error_code = error.code
        return of(error)

    @app.exception_handler(Unavailable)
    async def unavailable(_: Request, error: Unavailable) -> JSONResponse:
        return of(error)

    @app.exception_handler(asyncpg.DiskFullError)
    async def full(_: Request, error: asyncpg.DiskFullError) -> JSONResponse:
        return problem(503, "disk_full", "the disk of the database is full; make room, and the same request will work")

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        """Nobody raised it on purpose: it is logged with its traceback, and only its kind is told. No middleware sees
        this answer."""
        response = problem(500, "internal_error", f"the server failed ({type(error).__name__}); its log says more")
        response.headers.update({HEADER: request_id(), **getattr(request.state, "rate_headers", {})})
        return response

    @app.exception_handler(asyncpg.DataError)
    async def no_value(_: Request, error: asyncpg.DataError) -> JSONResponse:
        return problem(400, "invalid_request", f"a value of the request cannot be stored or looked up: {error}")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        param, message = describe(error.errors())
        if tuple(error.errors()[0]["loc"]) == ("body",) and error.errors()[0]["type"] in _NO_OBJECT:
            message = _no_object(request, error.body)
        return problem(400, "invalid_request", message, param)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        code = http.HTTPStatus(error.status_code).name.lower()
        response = problem(error.status_code, code, _said(request, error))
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(_methods(request))
        return response


def _said(request: Request, error: HTTPException) -> str:
    """What the framework refuses by itself, in a sentence."""
    if error.status_code == 404:
        return f"there is nothing at {request.url.path}; /v1/openapi.json describes what there is"
    if error.status_code == 405:
        takes = ", ".join(_methods(request)) or "another method"
        return f"{request.method} is not for {request.url.path}; it takes {takes}"
    cause = error.__cause__
    if isinstance(cause, RecursionError):
        return "the body is nested too deeply"
    if isinstance(cause, UnicodeDecodeError):
        return f"the body is not UTF-8: byte {cause.start} cannot be read"
    if isinstance(cause, ValueError):
        return "the body cannot be read as JSON: a number in it has too many digits"
    return str(error.detail)


def _methods(request: Request) -> list[str]:
    """What the address takes, as the document says."""
    found: set[str] = set()
    for path, verbs in request.app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\\{[^}]+\\}", "[^/]+", re.escape(path)), request.url.path):
            found.update(verb.upper() for verb in verbs)
    return sorted(found)


def _no_object(request: Request, body: Any) -> str:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body is None and request.headers.get("content-length", "0") == "0":
        return "the body is empty; send a JSON object, {} where there is nothing to say"
    if kind != "application/json" and not kind.endswith("+json"):
        return f"the body's Content-Type is {kind or 'not given'}; send a JSON object as application/json"
    return "the body must be a JSON object"


def describe(errors: Sequence[Any]) -> tuple[str | None, str]:
    """The first fault of a body: the field's path, and a sentence that names it."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return None, f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}"
    parts = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    where = ".".join(part for part in parts if not _KIND.fullmatch(part))
    if first["type"] == "extra_forbidden":
        return where, f"{where}: there is no such field"
    message = str(first["msg"]).removeprefix("Value error, ")
    return where or None, f"{where}: {message}" if where else message
