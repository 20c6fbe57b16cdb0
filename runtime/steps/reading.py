"""What a generated message means: an answer, calls, or something that was meant as a call and is none.

A call that stands there as plain text is repaired where its meaning is plain. What cannot be repaired goes back to the
model with a sentence, a bounded number of times; after that it counts as what it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from engine.tokens import FORMATS, Parsed, exact_json

MAX_CORRECTIONS = 2  # in a row, since the last message of the user

_ARGUMENTS = sorted({format.arguments_key for format in FORMATS})
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*?)\n?```\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Reading:
    """`outcome`: final, tools, or incomplete. `complaint`: what to tell the model in place of results, if anything."""

    outcome: str
    text: str
    calls: tuple[Mapping[str, Any], ...] = ()
    complaint: str = ""
    repaired: bool = False


def read(parsed: Parsed, ended: bool, tools: Collection[str], tool_choice: str, corrections: int) -> Reading:
    """`ended`: the message ended by itself, not at its token limit. A call that was cut off is never executed."""
    patient = corrections < MAX_CORRECTIONS
    if not parsed.complete:
        if ended and patient:
            return Reading("tools", parsed.text, complaint=_UNREADABLE)
        return Reading("incomplete", parsed.text)
    if tool_choice != "none" and parsed.calls:
        return Reading("tools", parsed.text, tuple({"name": c.name, "arguments": c.arguments} for c in parsed.calls))
    written = _written_calls(parsed.text)
    if written is None:
        return Reading("final", parsed.text)
    if tool_choice == "none":
        return _complain(parsed, _WORDS) if patient else Reading("final", parsed.text)
    if unknown := [call["name"] for call in written if call["name"] not in tools]:
        known = ", ".join(sorted(tools)) or "none"
        complaint = f"There is no tool {unknown[0]!r}. There are: {known}. Call one of these, or answer in words."
        return _complain(parsed, complaint) if patient and tools else Reading("final", parsed.text)
    return Reading("tools", "", tuple(written), repaired=True)


_UNREADABLE = (
    "This call could not be read: its JSON is not whole. Write the call again, with a name and an object of arguments."
)
_WORDS = "No tools are available for this answer. Answer in words, without a call."


def _complain(parsed: Parsed, complaint: str) -> Reading:
    return Reading("tools", parsed.text, complaint=complaint)


def _written_calls(text: str) -> list[dict[str, Any]] | None:
    """Calls that a message consists of, though it does not mark them as such; None: it is something else."""
    body = text.strip()
    if fenced := _FENCE.match(body):
        body = fenced[1].strip()
    if not body.startswith(("{", "[")):
        return None
    try:
        value = exact_json(body)
    except ValueError:
        return None
    calls = [_as_call(one) for one in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call] if calls and all(calls) else None


def _as_call(value: Any) -> dict[str, Any] | None:
    """A call by any format's names."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = next((value[key] for key in _ARGUMENTS if set(value) == {"name", key}), None)
    return {"name": name, "arguments": arguments} if isinstance(arguments, dict) else None
