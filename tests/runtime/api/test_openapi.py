"""What the OpenAPI document says is what the server does: odd requests, made from the document, against a real one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from runtime.api import make_app
from runtime.embedded import PostgresServer
from runtime.settings import Settings
from tests.runtime.api.server import Served, api_process

# These wait for nodes, of which none is here.
ASK_NODES = {
    "/v1/admin/engines",
    "/v1/admin/engines/{node_id}/spans",
    "/v1/admin/doctor",
    "/v1/admin/doctor/bundle",
    "/v1/admin/kv",
    "/v1/admin/kv/audit",
    "/v1/admin/metrics",
    "/v1/admin/reconcile",  # and a worker
    "/v1/chat/completions",  # a worker too: see tests/stack
    "/v1/responses",
}
EXAMPLES = 6  # of each route; `make soak` tries many more


@pytest.fixture(scope="module")
def server(postgres_server: PostgresServer, temporal_address: str, model_path: Path) -> Iterator[Served]:
    with api_process(postgres_server, temporal_address, model_path) as served:
        yield served


@pytest.fixture(scope="module")
def session_id(server: Served) -> str:
    made = httpx.post(f"{server.url}/v1/sessions", json={"tools": ["bash"]}, headers=server.headers)
    return str(made.json()["id"])


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(400, marks=pytest.mark.soak)])
def test_every_answer_is_one_that_the_document_names(server: Served, session_id: str, subtests, examples: int):
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    wanted: list[Any] = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
        checks.unsupported_method,
    ]

    def call(case: Any) -> None:
        wrong = {place.value for place, how in case.meta.components.items() if how.mode.is_negative}
        if not wrong and "session_id" in case.path_parameters:
            case.path_parameters["session_id"] = session_id
        for framing in ("content-length", "transfer-encoding"):
            case.headers.pop(framing, None)  # what is no HTTP at all is not ours to refuse
        waits = case.query.get("wait_s", 0)
        if (
            any(one.name == "wait_s" for one in case.operation.query)
            and type(waits) in (int, float)
            and 0 <= waits <= 60
        ):
            case.query["wait_s"] = 0  # there is no node to wait for
        # What is wrong with a query or a header may be lost on its way into a request; a body arrives as it is.
        sure = [checks.negative_data_rejection] if "body" in wrong else []
        case.call_and_validate(headers=server.headers, checks=[*wanted, *sure], timeout=30)

    refused = {"checks": {"negative_data_rejection": {"expected-statuses": [400, 401, 403, 404, 405, 409, 413, 415]}}}
    document = schemathesis.openapi.from_url(
        f"{server.url}/v1/openapi.json", headers=server.headers, config=schemathesis.Config.from_dict(refused)
    )
    operations = [one.ok() for one in document.get_all_operations()]
    assert len(operations) > 25
    for operation in operations:
        if operation.path.endswith("/stream"):
            continue  # it ends when its session does: see test_streams.py
        if operation.path in ASK_NODES:
            continue  # see test_workspace.py
        for mode in schemathesis.GenerationMode:
            with subtests.test(route=operation.label, mode=str(mode)):
                _try(call, operation.as_strategy(mode), examples)


def _try(call: Callable[[Any], None], cases: Any, examples: int) -> None:
    how = settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
        derandomize=examples == EXAMPLES,
        database=None,
    )
    with contextlib.suppress(Unsatisfiable):  # a route that takes nothing has no wrong input
        how(given(case=cases)(call))()


def test_every_route_says_what_it_does_takes_and_answers():
    app = make_app(Settings.load({}))
    document = app.openapi()
    names: list[str] = []
    for path, verbs in document["paths"].items():
        for verb, route in verbs.items():
            where = f"{verb} {path}"
            names.append(route["operationId"])
            assert route.get("description"), where
            for parameter in route.get("parameters", ()):
                assert parameter.get("description") or parameter["schema"].get("description"), (where, parameter)
            for kind, body in route.get("requestBody", {}).get("content", {}).items():
                assert kind != "application/json" or _example(document, body["schema"]) is not None, where
            assert any(status.startswith("2") for status in route["responses"]), where
    assert len(set(names)) == len(names)


def _example(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    schema = next((one for one in schema.get("anyOf", ()) if "$ref" in one), schema)
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return (schema.get("examples") or [None])[0]
