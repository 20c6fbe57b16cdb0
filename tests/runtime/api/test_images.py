"""Which images a session's sandbox may be made of."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from runtime.config import SessionConfig
from runtime.store import Database, fleet
from tests.runtime.api.conftest import CARD

CHILD = {"type": "session", "name": "ask", "description": "Ask.", "system": "Answer."}


async def refusal(client: httpx.AsyncClient, image: str) -> dict[str, Any]:
    answer = await client.post("/v1/sessions", json={"image": image})
    assert answer.status_code == 400, answer.text
    assert (await client.get("/v1/sessions")).json()["data"] == []
    return dict(answer.json()["error"])


async def test_an_image_that_the_operator_does_not_list_is_refused_with_the_name_of_the_setting(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    for allowed in ((), ("busybox:1",)):
        app.state.sandbox_images = allowed
        error = await refusal(client, "busybox")
        assert (error["param"], error["code"]) == ("image", "image_not_allowed")
        assert "TENUTO_SANDBOX_IMAGES" in error["message"]


@pytest.mark.parametrize("image", ["--privileged", "a b", "Upper/case", "x" * 256, ""])
async def test_what_is_no_name_is_refused_before_anything_is_asked(
    app: FastAPI, client: httpx.AsyncClient, image: str
) -> None:
    app.state.sandbox_images = ("*",)
    assert (await client.post("/v1/sessions", json={"image": image})).status_code in (400, 422)


async def test_where_no_node_has_docker_an_image_is_refused_and_where_one_has_it_is_kept(
    app: FastAPI, client: httpx.AsyncClient, dsn: str
) -> None:
    app.state.sandbox_images = ("*",)
    async with Database(dsn) as db:
        await fleet.register_node(db, "n", "b", "q", CARD, {"backend": "bubblewrap"})
        assert "bubblewrap" in (await refusal(client, "busybox"))["message"]
        await fleet.register_node(db, "n", "b", "q", CARD, {"backend": "docker"})
    made = await client.post("/v1/sessions", json={"image": "busybox"})
    assert made.status_code == 201, made.text
    assert made.json()["image"] == "busybox:latest"


def test_a_child_has_the_image_of_its_parent() -> None:
    config = SessionConfig.model_validate({"model": "m", "image": "busybox", "tools": [CHILD]})
    (tool,) = config.declared
    assert config.of_child(tool).image == "busybox:latest"  # type: ignore[arg-type]
