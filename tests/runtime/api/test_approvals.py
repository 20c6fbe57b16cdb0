"""Answers at the API: what does not belong to a decision is refused, not ignored."""

from __future__ import annotations

from typing import Any

import httpx
import pytest


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"decision": "approve", "output": "x"}, "output: does not belong to approve, which takes nothing"),
        ({"decision": "approve", "is_error": True}, "is_error: does not belong to approve"),
        ({"decision": "decline", "budget": {"tokens": 5}}, "budget: does not belong to decline, which takes reason"),
        ({"decision": "raise"}, "budget: give new limits"),
        ({"decision": "raise", "budget": {"tokens": 0.5}}, "tokens"),
        ({"decision": "raise", "budget": {"wall_s": 9e15}}, "wall_s"),
        ({"decision": "raise", "budget": {"coins": 3}}, "coins"),
        ({"decision": "result"}, "output: a result needs one"),
    ],
)
async def test_an_answer_that_says_something_else_is_refused(
    client: httpx.AsyncClient, body: dict[str, Any], said: str
) -> None:
    answer = await client.post("/v1/approvals/qst_1", json=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"decision": "approve", "reason": None, "is_error": False},
        {"decision": "raise", "budget": {"tokens": None}},
        {"decision": "result", "output": "", "is_error": True},
    ],
)
async def test_an_answer_that_is_one_is_looked_for(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    answer = await client.post("/v1/approvals/qst_1", json=body)
    assert answer.status_code == 404
    assert "qst_1" in answer.json()["error"]["message"]
