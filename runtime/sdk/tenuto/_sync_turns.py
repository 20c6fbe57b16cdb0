"""Turns of the blocking client: their events as they come, and what is answered meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Self

from tenuto import _turns
from tenuto._tool import Tool
from tenuto.errors import APIError, NeedsAnswer, TenutoError
from tenuto.models import Event, Question, Turn

if TYPE_CHECKING:
    from tenuto._sync import Client
    from tenuto._sync_sessions import Session


class Answers:
    """Answers what a session waits for: functions in threads of their own, each question once, approvals here."""

    def __init__(self, client: Client, tools: Mapping[str, Tool[..., Any]], approve: _turns.Approve | None) -> None:
        self._client = client
        self._tools = tools
        self._approve = _turns.asking(approve)
        self._threads: list[threading.Thread] = []
        self._failure: Exception | None = None

    def check(self) -> None:
        """Raises what kept an answer from being given."""
        if self._failure is not None:
            raise self._failure

    def give(self, question_id: str) -> None:
        """Answer a question, or begin to. Raises NeedsAnswer where nobody here can."""
        # Claimed before it is looked at: whoever claims one that was just answered is told so by the server.
        if not self._client._claims.take(question_id):
            return  # it is being answered, by another who follows the session
        begun = False
        try:
            question = self._client.question(question_id)
            begun = question.state == "open" and self._give(question)
        finally:
            if not begun:
                self._client._claims.drop(question_id)

    def _give(self, question: Question) -> bool:
        """Whether a function is at it from now on."""
        tool = self._tools.get(question.about["name"]) if question.kind == "client_tool" else None
        if tool is not None:
            self._begin(question, tool)
        elif question.kind == "approval" and self._approve is not None:
            self._answer(question, _turns.decision(self._approve(question)))
        else:
            self.finish()
            raise NeedsAnswer(question)
        return tool is not None

    def finish(self) -> None:
        """Wait for the functions that run."""
        for thread in self._threads:
            thread.join()
        self.check()

    def _begin(self, question: Question, tool: Tool[..., Any]) -> None:
        work = contextvars.copy_context().run
        thread = threading.Thread(target=work, args=(self._run, question, tool), name=f"tool-{tool.name}", daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()

    def _run(self, question: Question, tool: Tool[..., Any]) -> None:
        try:
            self._answer(question, _result(tool, question))
        except Exception as error:  # told where the session is followed
            self._failure = error
        else:
            self._client._claims.drop(question.id)  # from here on the server knows

    def _answer(self, question: Question, answer: Mapping[str, Any]) -> None:
        try:
            self._client.answer(question.id, **answer)
        except APIError as error:
            if not _turns.came_too_late(error):
                raise


def _result(tool: Tool[..., Any], question: Question) -> dict[str, Any]:
    arguments, refused = _turns.prepared(tool, question)
    if arguments is None:
        assert refused is not None
        return refused
    try:
        value = tool(**arguments)
        return _turns.settled(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)
    except BaseException as error:  # SystemExit too: the session waits for a result, whatever it is
        return _turns.failed(error)


async def _awaited(value: Any) -> Any:
    return await value


class RunningTurn:
    """One turn as it runs: a context manager that gives its events.

    While it is iterated, the session's functions run when it waits for them, and approvals are asked for. Leaving it
    early leaves the session working.
    """

    def __init__(self, session: Session, message: Mapping[str, Any], approve: _turns.Approve | None) -> None:
        self._session = session
        self._message = message
        self._answers = session._answers(approve)
        self._asked: list[str] = []
        self._reader: _turns.TurnReader | None = None
        self._events: Generator[Event, None, None] | None = None

    def __enter__(self) -> Self:
        before = self._session.info()
        self._reader = _turns.TurnReader(self._session.send(**self._message))
        if before.state in _turns.HOLDS_QUESTIONS:
            self._asked = [question.id for question in self._session.questions()]
        self._events = self._session.stream(before.last_event, watch=self._answers.check)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._events is not None:
            self._events.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        if self._reader is None or self._events is None:
            raise TenutoError("a turn begins as a context manager: with session.turn(...) as turn")
        if self._reader.done:
            raise StopIteration
        while self._asked:
            self._answers.give(self._asked.pop(0))
        event = next(self._events)
        self._reader.feed(event)
        if (question_id := _turns.asked(event)) is not None:
            self._asked.append(question_id)
        return event

    def result(self) -> Turn:
        """The turn, once all its events were read; those that are left are read now. Raises SessionFailed."""
        for _ in self:
            pass
        assert self._reader is not None
        return self._reader.result()
