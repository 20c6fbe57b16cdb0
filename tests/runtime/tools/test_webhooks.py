"""Deliveries of webhooks at the node, to a real server that checks the signatures itself and now and then says no."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from runtime import webhooks
from runtime.steps import sending
from runtime.steps.services import Services
from runtime.store import Database, fleet, outbox, sessions
from runtime.store import webhooks as store
from runtime.tools.egress import Egress
from sandbox.allow import parse_allow
from tests.runtime.store.conftest import Story
from workflows.contract import DeliveryIn

pytestmark = pytest.mark.model
TENANT = fleet.DEFAULT_TENANT


class Receiver:
    """Answers what it is told to, then 200; `heard`: what came, each with whether its signatures are right."""

    def __init__(self) -> None:
        self.url = ""
        self.secrets: list[str] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.heard: list[dict[str, Any]] = []

    def judge(self, headers: dict[str, str], body: bytes) -> list[bool]:
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        right = {
            "v1," + base64.b64encode(hmac.new(base64.b64decode(one[6:]), signed, hashlib.sha256).digest()).decode()
            for one in self.secrets
        }
        return [one in right for one in headers["webhook-signature"].split(" ")]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    told = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            told.heard.append({"headers": headers, "body": body, "right": told.judge(headers, body)})
            status, more = told.answers.pop(0) if told.answers else (200, {})
            self.send_response(status)
            for name, value in {"content-length": "0", **more}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.url = f"http://127.0.0.1:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield told
    server.shutdown()
    thread.join()
    server.server_close()


class Post:
    """A tenant with one webhook, and the node that sends."""

    def __init__(self, services: Services, receiver: Receiver) -> None:
        host = receiver.url.removeprefix("http://").partition("/")[0]
        self.services = dataclasses.replace(services, egress=Egress(parse_allow(host)))
        self.db: Database = services.db
        self.receiver = receiver

    async def webhook(self, *types: str) -> str:
        webhook_id, secret = sessions.new_id("whk"), webhooks.new_secret()
        self.receiver.secrets.append(secret)
        kept = self.services.sealer.seal(TENANT, webhooks.SECRET, secret)
        await store.create(self.db, TENANT, webhook_id, self.receiver.url, types, "", kept)
        return webhook_id

    async def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in await self.db.fetch("SELECT * FROM webhook_deliveries ORDER BY pos, created_at")]

    async def due(self) -> None:
        """Time passes: what is to be tried later is due."""
        await self.db.execute("UPDATE webhook_deliveries SET next_at = now() - interval '1 s'")

    async def send(self) -> float:
        [row] = await outbox.to_hand_over(self.db)
        return (await sending.send(self.services, DeliveryIn(row["delivery_id"], row["round"]))).wait_s


@pytest.fixture
async def post(node: Any, receiver: Receiver) -> Post:
    return Post(node.services, receiver)


async def test_a_row_comes_with_the_event_that_it_tells_of_and_holds_nothing_of_its_content(post: Post) -> None:
    story = Story(post.db)
    await post.webhook("message.accepted", "session.*")
    off = await post.webhook("session.*")
    await store.change(post.db, TENANT, off, {"disabled": True})
    await story.placed()
    await story.message("a private word")
    rows = await post.rows()
    assert [row["type"] for row in rows] == ["session.created", "session.placed", "message.accepted"]
    body = json.loads(rows[2]["body"])
    assert set(body) == {"type", "timestamp", "data"}
    assert body["data"] == {"session_id": story.session_id, "event": 3, "step": None, "state": "provisioning"}
    assert body["timestamp"].endswith("Z")
    assert "private" not in rows[2]["body"]


async def test_what_fails_twice_is_tried_again_under_the_same_id_and_is_delivered_once(post: Post) -> None:
    await post.webhook("session.created")
    post.receiver.answers = [(500, {}), (302, {"location": "/elsewhere"})]
    await Story(post.db).placed()
    waits = []
    for _ in range(3):
        waits.append(await post.send())
        await post.due()
    assert [round(wait) for wait in waits] == [1, pytest.approx(10, abs=1), 0]
    [row] = await post.rows()
    assert (row["state"], row["attempts"], row["last_status"]) == ("delivered", 3, 200)
    heard = post.receiver.heard
    assert [each["right"] for each in heard] == [[True]] * 3
    assert {each["headers"]["webhook-id"] for each in heard} == {row["delivery_id"]}
    assert {each["body"] for each in heard} == {row["body"].encode()}
    assert await outbox.to_hand_over(post.db) == []


async def test_a_receiver_is_left_alone_for_as_long_as_it_asks(post: Post) -> None:
    await post.webhook("session.created")
    post.receiver.answers = [(429, {"retry-after": "120"}), (503, {"retry-after": "Fri, 01 Jan 2100 00:00:00 GMT"})]
    await Story(post.db).placed()
    assert await post.send() == 120.0
    [row] = await post.rows()
    early = await sending.send(post.services, DeliveryIn(row["delivery_id"], 1))
    assert (early.wait_s > 100, len(post.receiver.heard)) == (True, 1)
    await post.due()
    assert await post.send() == 86_400.0


async def test_a_receiver_that_is_gone_disables_its_webhook_and_what_else_was_to_go_there(post: Post) -> None:
    webhook = await post.webhook("session.*")
    post.receiver.answers = [(410, {})]
    await Story(post.db).placed()
    first, second = await outbox.to_hand_over(post.db)
    for row in (first, second):
        assert (await sending.send(post.services, DeliveryIn(row["delivery_id"], 1))).wait_s == 0.0
    assert sorted(row["state"] for row in await post.rows()) == ["cancelled", "failed"]
    row = await store.get(post.db, TENANT, webhook)
    assert (row["disabled_at"] is not None, row["disabled_why"]) == (True, "its receiver answered 410 Gone")
    assert len(post.receiver.heard) == 1


async def test_after_eight_tries_a_delivery_has_failed_and_can_be_replayed(post: Post) -> None:
    webhook = await post.webhook("session.created")
    post.receiver.answers = [(500, {})] * webhooks.TRIES
    await Story(post.db).placed()
    for _ in range(webhooks.TRIES):
        await post.send()
        await post.due()
    [row] = await post.rows()
    assert (row["state"], row["attempts"]) == ("failed", webhooks.TRIES)
    for _ in range(2):
        await store.replay(post.db, TENANT, webhook, row["delivery_id"], "rpl_1")
    assert await post.send() == 0.0
    [row] = await post.rows()
    assert (row["state"], row["round"], row["attempts"]) == ("delivered", 2, 1)
    assert len({each["headers"]["webhook-id"] for each in post.receiver.heard}) == 1


async def test_both_secrets_sign_until_the_old_one_has_had_its_time(post: Post) -> None:
    webhook = await post.webhook("session.created")
    new = webhooks.new_secret()
    kept = post.services.sealer.seal(TENANT, webhooks.SECRET, new)
    assert await store.rotate(post.db, TENANT, webhook, "rot_1", kept, 3600)
    assert not await store.rotate(post.db, TENANT, webhook, "rot_1", kept, 3600)
    post.receiver.secrets.append(new)
    await Story(post.db).placed()
    await post.send()
    assert post.receiver.heard[-1]["right"] == [True, True]
    await post.db.execute("UPDATE webhooks SET old_until = now()")
    post.receiver.secrets = [new]
    await Story(post.db).placed()
    await post.send()
    assert post.receiver.heard[-1]["right"] == [True]


async def test_a_host_that_is_listed_no_longer_is_not_sent_to(post: Post) -> None:
    await post.webhook("session.created")
    post.services = dataclasses.replace(post.services, egress=Egress(parse_allow("example.org")))
    await Story(post.db).placed()
    await post.send()
    [row] = await post.rows()
    assert (row["state"], row["attempts"], post.receiver.heard) == ("pending", 1, [])
    assert "TENUTO_EGRESS_ALLOW" in row["last_error"]


async def test_two_that_send_the_same_delivery_count_one_try(post: Post) -> None:
    await post.webhook("session.created")
    await Story(post.db).placed()
    [row] = await outbox.to_hand_over(post.db)
    seen = await outbox.to_send(post.db, row["delivery_id"], 1)
    assert seen is not None
    for state in ("pending", "delivered"):
        await outbox.note_try(post.db, seen, state, 500, None, 0.0)
    [row] = await post.rows()
    assert (row["state"], row["attempts"]) == ("pending", 1)


async def test_a_receiver_whose_answer_never_ends_fails_the_try_and_not_the_sender(
    post: Post, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = asyncio.Event()

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
            while not writer.is_closing():
                writer.write(b"y")
                await writer.drain()
                await asyncio.sleep(0.02)  # never silent for long
        writer.close()
        left.set()

    monkeypatch.setattr(sending, "WHOLE_S", 0.3)
    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        receiver.url = f"http://127.0.0.1:{port}/hook"
        slow = Post(post.services, receiver)
        await slow.webhook("session.created")
        await Story(post.db).placed()
        assert await slow.send() > 0
        await left.wait()  # it hears that the sender has gone
    [row] = await post.rows()
    assert (row["state"], row["attempts"], row["last_error"]) == ("pending", 1, "it did not answer within 0.3 seconds")
