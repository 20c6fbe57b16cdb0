"""Turns of the asyncio client: their events as they come, and what is answered meanwhile."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Self

from tenuto import _turns
from tenuto._tool import Tool
from tenuto.errors import APIError, NeedsAnswer, TenutoError
from tenuto.models import Event, Question, Turn

if TYPE_CHECKING:
    from tenuto._async import AsyncClient
    from tenuto._async_sessions import AsyncSession


class AsyncAnswers:
    """Answers what a session waits for: functions in tasks of their own, blocking ones in threads, each question once,
    approvals here."""

    def __init__(
        self, client: AsyncClient, tools: Mapping[str, Tool[..., Any]], approve: _turns.Approve | None
    ) -> None:
        self._client = client
        self._tools = tools
        self._approve = _turns.asking(approve)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None

    def check(self) -> None:
        """Raises what kept an answer from being given."""
        if self._failure is not None:
            raise self._failure

    async def give(self, question_id: str) -> None:
        """Answer a question, or begin to. Raises NeedsAnswer where nobody here can."""
        # Claimed before it is looked at: whoever claims one that was just answered is told so by the server.
        if not self._client._claims.take(question_id):
            return  # it is being answered, by another who follows the session
        begun = False
        try:
            question = await self._client.question(question_id)
            begun = question.state == "open" and await self._give(question)
        finally:
            if not begun:
                self._client._claims.drop(question_id)

    async def _give(self, question: Question) -> bool:
        """Whether a function is at it from now on."""
        tool = self._tools.get(question.about["name"]) if question.kind == "client_tool" else None
        if tool is not None:
            self._begin(question, tool)
        elif question.kind == "approval" and self._approve is not None:
            verdict = self._approve(question)
            verdict = await verdict if inspect.isawaitable(verdict) else verdict
            await self._answer(question, _turns.decision(verdict))
        else:
            await self.finish()
            raise NeedsAnswer(question)
        return tool is not None

    async def finish(self) -> None:
        """Wait for the functions that run."""
        await asyncio.gather(*self._tasks)
        self.check()

    async def leave(self) -> None:
        """Cancel the functions that still run: nobody waits for them."""
        for task in (left := set(self._tasks)):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _begin(self, question: Question, tool: Tool[..., Any]) -> None:
        task = asyncio.create_task(self._run(question, tool), name=f"tool-{tool.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, question: Question, tool: Tool[..., Any]) -> None:
        try:
            await self._answer(question, await _result(tool, question))
        except Exception as error:  # told where the session is followed
            self._failure = error
        else:
            self._client._claims.drop(question.id)  # from here on the server knows

    async def _answer(self, question: Question, answer: Mapping[str, Any]) -> None:
        try:
            await self._client.answer(question.id, **answer)
        except APIError as error:
            if not _turns.came_too_late(error):
                raise


async def _result(tool: Tool[..., Any], question: Question) -> dict[str, Any]:
    arguments, refused = _turns.prepared(tool, question)
    if arguments is None:
        assert refused is not None
        return refused
    try:
        return _turns.settled(await _called(tool, arguments))
    except Exception as error:  # the session waits for a result, whatever it is
        return _turns.failed(error)


async def _called(tool: Tool[..., Any], arguments: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(tool.function):
        return await tool(**arguments)
    value = await asyncio.to_thread(lambda: tool(**arguments))
    return await value if inspect.isawaitable(value) else value


class AsyncRunningTurn:
    """One turn as it runs: an async context manager that gives its events.

    While it is iterated, the session's functions run when it waits for them, and approvals are asked for. Leaving it
    early leaves the session working.
    """

    def __init__(self, session: AsyncSession, message: Mapping[str, Any], approve: _turns.Approve | None) -> None:
        self._session = session
        self._message = message
        self._answers = session._answers(approve)
        self._asked: list[str] = []
        self._reader: _turns.TurnReader | None = None
        self._events: AsyncGenerator[Event, None] | None = None

    async def __aenter__(self) -> Self:
        before = await self._session.info()
        self._reader = _turns.TurnReader(await self._session.send(**self._message))
        if before.state in _turns.HOLDS_QUESTIONS:
            self._asked = [question.id for question in await self._session.questions()]
        self._events = self._session.stream(before.last_event, watch=self._answers.check)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._events is not None:
            await self._events.aclose()
        await self._answers.leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._reader is None or self._events is None:
            raise TenutoError("a turn begins as a context manager: async with session.turn(...) as turn")
        if self._reader.done:
            raise StopAsyncIteration
        while self._asked:
            await self._answers.give(self._asked.pop(0))
        event = await anext(self._events)
        self._reader.feed(event)
        if (question_id := _turns.asked(event)) is not None:
            self._asked.append(question_id)
        return event

    async def result(self) -> Turn:
        """The turn, once all its events were read; those that are left are read now. Raises SessionFailed."""
        async for _ in self:
            pass
        assert self._reader is not None
        return self._reader.result()
