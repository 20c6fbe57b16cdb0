"""A webhook against the whole stack: told of a real event by a node that was killed meanwhile."""

from __future__ import annotations

import asyncio

import pytest

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.model]


async def test_a_delivery_outlives_the_node_that_was_to_send_it(client, stack, web):
    hook = await client.post("/v1/webhooks", {"url": f"{web.url}/hook", "types": ["session.created"]})
    restarted = stack.restarted("node", stack.kill("node"))
    session = await client.sessions.create(seed=51)
    await restarted
    async with asyncio.timeout(60):
        while True:
            [delivery] = (await client.get(f"/v1/webhooks/{hook['id']}/deliveries"))["data"]
            if delivery["state"] == "delivered":
                break
            await asyncio.sleep(0.1)
    heard = [each for each in web.requests if each["path"] == "/hook" and session.id in each["body"]]
    assert {each["headers"]["webhook-id"] for each in heard} == {delivery["id"]}
    assert delivery["attempts"] == 1
    await client.delete(f"/v1/webhooks/{hook['id']}")
    await session.cancel()
