"""A query that a route does not know is refused: a filter that is misspelt must not give everything."""

from __future__ import annotations

import difflib

from fastapi import Request
from fastapi.routing import APIRoute

from runtime.errors import InvalidRequest


def only_known(request: Request) -> None:
    """A dependency of every route. Raises InvalidRequest (unknown_parameter)."""
    route = request.scope.get("route")
    if not isinstance(route, APIRoute):
        return
    described = request.app.openapi()["paths"].get(route.path_format, {}).get(request.method.lower(), {})
    known = {one["name"] for one in described.get("parameters", []) if one["in"] == "query"}
    for name in request.query_params:
        if name not in known:
            raise InvalidRequest(f"{name}: {_instead(name, known)}", param=name, code="unknown_parameter")


def _instead(name: str, known: set[str]) -> str:
    if near := difflib.get_close_matches(name, known, 1):
        return f"there is no such parameter; do you mean {near[0]}?"
    return f"there is no such parameter; {'there are ' + ', '.join(sorted(known)) if known else 'this takes none'}"
