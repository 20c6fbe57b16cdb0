"""While a turn runs: functions for the session, words of approval, and what nobody here can answer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tenuto

from tests.sdk.server import Answer, Seen, as_json, problem
from tests.sdk.test_turns import INFO, Log


class Desk:
    """A session that asks questions: what it asked, and what it was answered. The turn ends once all are answered."""

    def __init__(self, *questions: dict[str, Any], state: str = "idle") -> None:
        self.questions = {one["id"]: one for one in questions}
        self.answers: dict[str, dict[str, Any]] = {}
        self.refuse: Callable[[str], Answer | None] = lambda _: None
        self.ends_by_itself = False
        self._info = {**INFO, "state": state}
        self._settled = threading.Condition()

    def answer(self, seen: Seen) -> Answer:
        path = seen.path.partition("?")[0]
        if path.endswith("/stream"):
            return self._stream()
        if path == "/v1/approvals":
            return as_json({"data": [one for one in self.questions.values() if one["state"] == "open"]})
        if path.startswith("/v1/approvals/"):
            question_id = path.rpartition("/")[2]
            if seen.method == "POST":
                return self._answered(question_id, json.loads(seen.body))
            return as_json(self.questions[question_id])
        return as_json({"id": "msg_ours"}, 202) if seen.method == "POST" else as_json(self._info)

    def _answered(self, question_id: str, body: dict[str, Any]) -> Answer:
        if refused := self.refuse(question_id):
            return refused
        with self._settled:
            assert question_id not in self.answers, "answered twice"
            self.answers[question_id] = body
            self.questions[question_id] |= {"state": "answered"}
            self._settled.notify_all()
        return as_json(self.questions[question_id])

    def _stream(self) -> Answer:
        asked = {"client_tool": "tool.client_required", "approval": "tool.approval_required"}
        log = Log().input("msg_ours")
        for one in self.questions.values():
            log.add(asked.get(one["kind"], "budget.exhausted"), question_id=one["id"], **one["about"])
        first = b"".join(log.frames)
        log.think("tide")
        last = b"".join(log.frames)[len(first) :]
        return Answer(200, first, "text/event-stream", then=lambda: self._rest(last))

    def _rest(self, last: bytes) -> Iterator[bytes]:
        """Signs of life until all is answered."""
        while True:
            with self._settled:
                if self.ends_by_itself or self.answers.keys() >= self.questions.keys():
                    break
                self._settled.wait(0.02)
            yield b": here\n\n"
        yield last


def asks(id: str, name: str, kind: str = "client_tool", state: str = "open", /, **arguments: Any) -> dict[str, Any]:
    about = {"name": name, "arguments": arguments}
    return {"id": id, "kind": kind, "session_id": "ses_1", "step": 2, "call": 0, "about": about, "state": state}


@pytest.fixture
def opened(client: Any, server: Any) -> Callable[..., Any]:
    def open_session(desk: Desk, *tools: Any) -> Any:
        server.replies = [desk.answer]
        return client.sessions.get("ses_1", tools=tools)

    return open_session


def test_functions_blocking_and_async_answer_for_the_session(opened: Any) -> None:
    def double(n: int) -> int:
        return 2 * n

    async def greet(name: str) -> str:
        await asyncio.sleep(0)
        return f"hello {name}"

    desk = Desk(asks("q1", "double", n="4"), asks("q2", "greet", name="ada"))
    assert opened(desk, double, greet).run("Go.").text == "tide"
    assert desk.answers == {
        "q1": {"decision": "result", "output": "8"},
        "q2": {"decision": "result", "output": "hello ada"},
    }


def test_calls_that_wait_run_at_once(opened: Any) -> None:
    both = threading.Barrier(2)

    def meet(who: str) -> str:
        both.wait(timeout=30)
        return who

    desk = Desk(asks("q1", "meet", who="a"), asks("q2", "meet", who="b"))
    opened(desk, meet).run("Go.")
    assert [desk.answers[one]["output"] for one in ("q1", "q2")] == ["a", "b"]


def test_what_goes_wrong_in_a_function_is_told_to_the_model(opened: Any) -> None:
    def fails(n: int) -> None:
        raise LookupError("no such row")

    def odd() -> object:
        value: list[Any] = []
        value.append(value)
        return value

    desk = Desk(asks("q1", "fails", n=1), asks("q2", "fails", n="many"), asks("q3", "odd"))
    opened(desk, fails, odd).run("Go.")
    assert desk.answers["q1"] == {"decision": "result", "output": "LookupError: no such row", "is_error": True}
    assert desk.answers["q2"]["output"].startswith("ToolError: n: Input should be a valid integer")
    assert (desk.answers["q3"]["is_error"], "Traceback" in desk.answers["q3"]["output"]) == (True, False)


def test_a_question_that_comes_twice_is_answered_once(opened: Any) -> None:
    calls: list[int] = []

    def count() -> int:
        calls.append(1)
        return len(calls)

    desk = Desk(asks("q1", "count"), state="waiting")  # listed when the turn begins, and told by an event
    opened(desk, count).run("Go.")
    assert (calls, desk.answers["q1"]["output"]) == ([1], "1")


def test_a_question_that_was_answered_elsewhere_is_left_alone(opened: Any) -> None:
    desk = Desk(asks("q1", "never", "client_tool", "answered"))
    desk.ends_by_itself = True
    assert opened(desk, tenuto.tool(name="never")(lambda: 1)).run("Go.").text == "tide"
    assert desk.answers == {}


@pytest.mark.parametrize("status", [404, 409])
def test_a_result_that_comes_too_late_is_dropped(opened: Any, status: int) -> None:
    done = threading.Event()

    def slow() -> str:
        done.set()
        return "late"

    desk = Desk(asks("q1", "slow"))

    def refuse(_: str) -> Answer:
        desk.ends_by_itself = True
        return problem(status, "conflict", "question q1 expired")

    desk.refuse = refuse
    assert opened(desk, slow).run("Go.").text == "tide"
    assert done.is_set()


def test_a_turn_ends_though_a_function_does_not(opened: Any) -> None:
    begun, go_on = threading.Event(), threading.Event()
    desk = Desk(asks("q1", "endless"))

    def endless() -> None:
        begun.set()
        desk.ends_by_itself = True
        go_on.wait(30)

    assert opened(desk, endless).run("Go.").text == "tide"
    assert begun.is_set()
    go_on.set()


def test_an_answer_that_cannot_be_given_ends_the_run_with_what_the_server_said(opened: Any) -> None:
    desk = Desk(asks("q1", "one"))
    desk.refuse = lambda _: problem(401, "unauthorized", "this key is revoked")
    with pytest.raises(tenuto.APIError, match="this key is revoked"):
        opened(desk, tenuto.tool(name="one")(lambda: 1)).run("Go.")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (True, {"decision": "approve"}),
        (False, {"decision": "decline"}),
        (("decline", "not now"), {"decision": "decline", "reason": "not now"}),
    ],
)
def test_approve_is_asked_of_calls_that_wait_for_a_word(opened: Any, said: Any, answer: dict[str, str]) -> None:
    heard: list[str] = []

    def approve(question: tenuto.Question) -> Any:
        heard.append(question.about["name"])
        return said

    desk = Desk(asks("q1", "deploy", "approval"))
    opened(desk).run("Go.", approve=approve)
    assert (heard, desk.answers) == (["deploy"], {"q1": answer})


def test_an_approve_that_says_something_else_is_a_sentence(opened: Any) -> None:
    with pytest.raises(tenuto.TenutoError, match="approve gave 'yes'; it must give True, False or"):
        opened(Desk(asks("q1", "deploy", "approval"))).run("Go.", approve=lambda _: "yes")


@pytest.mark.parametrize("kind", ["approval", "client_tool", "outcome", "budget"])
def test_what_nobody_here_can_answer_is_raised_with_the_question(opened: Any, kind: str) -> None:
    with pytest.raises(tenuto.NeedsAnswer, match=r"session ses_1 waits for .*deploy; answer q1 with '") as caught:
        opened(Desk(asks("q1", "deploy", kind))).run("Go.")
    assert caught.value.question.kind == kind


def test_functions_that_run_are_waited_for_before_a_missing_answer_is_raised(opened: Any) -> None:
    desk = Desk(asks("q1", "one"), asks("q2", "deploy", "approval"))
    with pytest.raises(tenuto.NeedsAnswer):
        opened(desk, tenuto.tool(name="one")(lambda: "done")).run("Go.")
    assert desk.answers == {"q1": {"decision": "result", "output": "done"}}


def test_a_turn_gives_its_events_as_they_come(server: Any, hasty: None) -> None:
    server.replies = [Desk().answer]
    with tenuto.Client(server.url, "k") as blocking:
        with blocking.sessions.get("ses_1").turn("Go.") as turn:
            seen = [event.type for event in turn]
        assert (seen[-1], turn.result().text) == ("session.idle", "tide")


def test_an_async_approve_is_awaited(server: Any, hasty: None) -> None:
    desk = Desk(asks("q1", "deploy", "approval"))
    server.replies = [desk.answer]

    async def approve(question: tenuto.Question) -> bool:
        await asyncio.sleep(0)
        return True

    async def work() -> list[str]:
        async with tenuto.AsyncClient(server.url, "k") as client:
            session = await client.sessions.get("ses_1")
            async with session.turn("Go.", approve=approve) as turn:
                return [event.type async for event in turn]

    assert asyncio.run(work())[-1] == "session.idle"
    assert desk.answers == {"q1": {"decision": "approve"}}


def test_a_turn_that_was_not_entered_says_how() -> None:
    with tenuto.Client("http://127.0.0.1:1", "k") as client:
        turn = tenuto.Session(client, "ses_1").turn("Go.")
        with pytest.raises(tenuto.TenutoError, match=r"with session\.turn"):
            next(turn)
