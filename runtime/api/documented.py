"""How routes describe themselves: the shapes of answers, lists with cursors, and the refusals that can come.

A route returns a `Shape` (FastAPI checks what it sends against it, so the OpenAPI document cannot lie), takes a `Body`
(runtime/config.py), and names in `responses=refusals(...)` the statuses that are its own. Those that any route can
answer with are named once, in `EVERYWHERE`, for the whole application.
"""

from __future__ import annotations

import http
from collections.abc import Mapping
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from fastapi import FastAPI, Path, Query
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict

MEDIA_TYPE: Final = "application/problem+json"
REF: Final = {"$ref": "#/components/schemas/Problem"}
# What any route may say: a malformed request, no key, a foreign page or a key that may not, a body that is too large,
# too many requests, a part that is away for a moment.
EVERYWHERE: Final = (400, 401, 403, 413, 429, 503)


class Shape(BaseModel):
    """An answer. What is not in it is not sent."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Item = TypeVar("Item")


class Page(Shape, Generic[Item]):
    """A part of a list; ask for the next one with `after` set to `last_id` while `has_more`."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool = False
    first_id: Any = None
    last_id: Any = None


class Fault(Shape):
    """What OpenAI's clients read of a refusal."""

    message: str
    type: str
    code: str
    param: str | None


class Problem(Shape):
    """A refusal (RFC 9457): what was wrong, and what to do."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str
    error: Fault


# A name in a path: an id of ours, or one that its owner chose. What no id can be is refused before it is looked up.
Id = Annotated[str, Path(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:@~-]+$")]
Limit = Annotated[int, Query(ge=1, le=1000, description="How many at most.")]
After = Annotated[
    str | None, Query(min_length=1, max_length=300, description="The `last_id` of the page before this one.")
]


# What parameters of these names mean wherever they stand.
SAID: Final[Mapping[str, str]] = {
    "action": "What was done, as `keys.revoke`.",
    "after": "The `last_id` of the page before this one; of events, a position.",
    "call": "The number of the call in its step, from 0.",
    "change_id": "The id that the change was accepted under.",
    "conversation_id": "The conversation's id.",
    "delivery_id": "The delivery's id, which its receiver sees as `webhook-id`.",
    "exec_id": "The id that the command was accepted under.",
    "format": "As JSON, or as CSV with a header row.",
    "group_by": "What a row stands for; several may be given.",
    "intent": "What is wanted of the session's pages.",
    "item_id": "The item's id.",
    "key": "A key's id.",
    "kind": "What is asked.",
    "key_id": "The key's id.",
    "last-event-id": "The position that the reader has seen last; it counts before `after`.",
    "model": "A model's name.",
    "node": "A node's id.",
    "node_id": "The node's id.",
    "number": "The number of the version, from 1.",
    "order": "By when they were made.",
    "outcome": "How it ended.",
    "question_id": "The question's id.",
    "response_id": "The response's id.",
    "schedule_id": "The schedule's id.",
    "session": "A session's id.",
    "session_id": "The session's id.",
    "state": "In this state only.",
    "step": "The number of a step.",
    "target": "What it was done to.",
    "tenant": "A tenant's id.",
    "tenant_id": "The tenant's id.",
    "tier": "Where pages are.",
    "webhook_id": "The webhook's id.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route (or router) that can refuse with these, beside EVERYWHERE."""
    return {
        status: {"description": http.HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": REF}}}
        for status in statuses
    }


def name_of(route: APIRoute) -> str:
    """The operation's id, for clients that are generated."""
    return f"{route.tags[0] if route.tags else 'v1'}_{route.name}".replace("-", "_")


def describe(app: FastAPI) -> None:
    """The OpenAPI document, as what is served: problem documents for every refusal, and a bearer key."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs"))
    schemas["Problem"] = problem
    for gone in ("HTTPValidationError", "ValidationError"):  # ours are problem documents
        schemas.pop(gone, None)
    made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, verbs in made["paths"].items():
        for route in verbs.values():
            route["responses"].pop("422", None)
            for parameter in route.get("parameters", ()):
                if parameter["name"] in SAID:
                    parameter.setdefault("description", SAID[parameter["name"]])
            open_to_all = not path.startswith("/v1/")
            if not open_to_all:
                route["security"] = [{"key": []}]
            for status, said in refusals(*(set(EVERYWHERE) - ({401, 429} if open_to_all else set()))).items():
                route["responses"].setdefault(str(status), said)
    return made


def page_of(data: list[Item], has_more: bool) -> Page[Item]:
    """A part of a list of things that have ids."""
    first, last = (data[0], data[-1]) if data else (None, None)
    return Page(data=data, has_more=has_more, first_id=getattr(first, "id", None), last_id=getattr(last, "id", None))
