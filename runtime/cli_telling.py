"""Events of a session as people read them, one line each."""

from __future__ import annotations

import json
from typing import Any

import click
import tenuto

_WIDE = 300  # characters of what an event holds
_GOOD = frozenset({"session.idle", "session.completed", "message.completed", "step.completed"})
_BAD = frozenset({"session.failed", "step.failed", "command.refused", "session.cancelled", "sandbox.egress_denied"})
_ASKS = frozenset({"tool.approval_required", "tool.client_required", "tool.outcome_unknown", "budget.exhausted"})


def tell(event: tenuto.Event, as_json: bool) -> None:
    """Print an event: as it is, or a line for people, in which sampled pieces of a message are left to the message."""
    if as_json:
        click.echo(event.model_dump_json())
    elif event.type != "model.delta":
        click.echo(line(event))


def line(event: tenuto.Event) -> str:
    """Position, time (UTC), step, type, and what it says."""
    colour = "green" if event.type in _GOOD else "red" if event.type in _BAD else None
    colour = "yellow" if event.type in _ASKS else colour
    step = "" if event.step is None else f"step {event.step}"
    name = click.style(f"{event.type:<24}", fg=colour)
    return f"{event.id:>6}  {event.created_at:%H:%M:%S}  {step:<8} {name} {said(event)}".rstrip()


def said(event: tenuto.Event) -> str:
    """What an event says, in one line."""
    data = event.data
    if event.type == "message.completed":
        return f"{data['outcome']}: {shortened(data['text'])}"
    if event.type == "tool.settled":
        return f"{data['name']} ({data['reason']}) {shortened(data['preview'])}".rstrip()
    if event.type in _ASKS:
        return f"{data['question_id']} {about(data)}"
    if event.type == "message.accepted":
        return shortened(data["content"])
    plain = {name: value for name, value in data.items() if isinstance(value, str | int | float) and value != ""}
    return shortened(" ".join(f"{name}={value}" for name, value in plain.items()))


def about(data: dict[str, Any]) -> str:
    """What a question is about: the call with its arguments, or the measure that is used up."""
    if "measure" in data:
        return f"{data['measure']}: {data.get('spent') or 0:.12g} of {data.get('limit') or 0:.12g}"
    return shortened(f"{data.get('name', '')} {json.dumps(data.get('arguments', {}), ensure_ascii=False)}".strip())


def shortened(text: str) -> str:
    """One line of it, without what would steer a terminal."""
    flat = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return flat if len(flat) <= _WIDE else f"{flat[:_WIDE]}…"
