"""`/v1/plan`: the same arithmetic as the command's, in the open; nothing is created."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.capacity.support import config, plan
from tests.runtime.api.test_keys import bearer, make


async def test_a_plan_is_the_one_of_the_command_line(client: httpx.AsyncClient) -> None:
    wish = {"device": "h100", "tp": 4, "context": 8192, "users": 500}
    answer = await client.post("/v1/plan", json={"config": config("llama-3-70b"), "name": "llama-3-70b", **wish})
    assert answer.status_code == 200, answer.text
    assert answer.json() == json.loads(json.dumps(plan("llama-3-70b", **wish).as_json()))
    assert answer.json()["users_by_memory"] == 54


async def test_a_key_of_use_scope_is_enough(client: httpx.AsyncClient) -> None:
    key = bearer((await make(client, scope="use"))["key"])
    asked = {"config": config("qwen2.5-0.5b"), "device": "l4"}
    assert (await client.post("/v1/plan", json=asked, headers=key)).status_code == 200
    devices = (await client.get("/v1/plan/devices", headers=key)).json()["data"]
    assert {"h100", "mi300x", "gb200-nvl72"} <= {one["id"] for one in devices}
    assert all(one["source"] for one in devices)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"config": {}}, "model_type", "does not have it"),
    ({"tp": 5}, "tp", "legal are 1, 2, 4, 8"),
    ({"device": "h1000"}, "device", "did you mean h100"),
    ({"device": "cpu"}, "device", "measured on the machine"),
    ({"context": 8193}, "context", "beyond_context"),
    ({"slo_tpot_s": 1e-6}, "slo_tpot_s", "cannot be met"),
    ({"kv_dtype": "q9"}, "kv_dtype", "there are fp32, bf16"),
    ({"users": -1}, "users", "greater than or equal to 1"),
    ({"user": 1}, "user", ""),
]
ODD = [
    '{"config": {"model_type": "llama", "hidden_size": NaN}}',
    '{"config": {"model_type": "llama", "hidden_size": 1e999}}',
    '{"config": {"model_type": "llama", "hidden_size": ' + "9" * 400 + "}}",
    '{"config": ' + '{"a":' * 3000 + "1" + "}" * 3000 + "}",
    '{"config": {"model_type": ["llama"]}, "util": NaN}',
    '{"config": []}',
]


async def test_what_cannot_be_planned_names_its_key(client: httpx.AsyncClient) -> None:
    for changes, param, said in REFUSED:
        answer = await client.post("/v1/plan", json={"config": config("llama-3-70b"), **changes})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert said in answer.json()["detail"]


async def test_odd_json_is_a_sentence(client: httpx.AsyncClient) -> None:
    for text in ODD:
        answer = await client.post("/v1/plan", content=text, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
