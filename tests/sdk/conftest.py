from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tenuto import _wire

from tests.sdk.server import StubServer, open_client


@pytest.fixture
def server() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


@pytest.fixture(params=["blocking", "asyncio"])
def client(request: pytest.FixtureRequest, server: StubServer, hasty: None) -> Iterator[Any]:
    """Each client in turn: every test of the wire holds for both."""
    yield from open_client(request.param, server.url, "tk_test")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without their pauses."""
    monkeypatch.setattr(_wire, "pause_before", lambda attempt: 0.0)
