"""A tool may print more than the context holds: what the model reads of it is shortened, what is kept is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from engine.tokens import ChatFormat, ToolResult
from runtime.errors import InvalidRequest

SMALLEST = 80  # characters of a result that are still worth reading


def fitted(chat: ChatFormat, results: Sequence[ToolResult], room: int) -> list[int]:
    """Token ids of the results, each shortened in its middle if they take more than `room` tokens.

    Raises InvalidRequest (context_length_exceeded) where there is no room even for a little of each.
    """
    shown, limit = list(results), max(len(result.content) for result in results)
    while len(tokens := chat.tool_results(shown)) > room:
        if limit <= SMALLEST or room <= 0:
            raise InvalidRequest(
                "the context is full: there is no room for the tool's result; start a new session",
                code="context_length_exceeded",
            )
        limit = max(SMALLEST, int(limit * min(0.9, 0.9 * room / len(tokens))))
        shown = [dataclasses.replace(result, content=shortened(result.content, limit)) for result in results]
    return tokens


def shortened(text: str, limit: int) -> str:
    """At most about `limit` characters: the beginning and the end, which say most."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit * 2 // 3], text[len(text) - limit // 3 :]
    return f"{head}\n[{len(text) - len(head) - len(tail)} characters left out]\n{tail}"
