"""A query that a route does not know is refused: a filter that is misspelt must not give everything."""

from __future__ import annotations

import difflib

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from runtime.errors import InvalidRequest


async def only_known(request: Request) -> None:
    """A dependency of every route. Raises InvalidRequest (unknown_parameter)."""
    route = request.scope.get("route")
    if not isinstance(route, APIRoute):
        return
    known = _query_names(route.dependant)
    for name in request.query_params:
        if name not in known:
            raise InvalidRequest(f"{name}: {_instead(name, known)}", param=name, code="unknown_parameter")


def _query_names(dependant: Dependant) -> set[str]:
    """Of a route, and of what it depends on."""
    own = {field.alias for field in dependant.query_params}
    return own.union(*(_query_names(one) for one in dependant.dependencies))


def _instead(name: str, known: set[str]) -> str:
    if near := difflib.get_close_matches(name, known, 1):
        return f"there is no such parameter; do you mean {near[0]}?"
    return f"there is no such parameter; {'there are ' + ', '.join(sorted(known)) if known else 'this takes none'}"
