"""What Temporal's history says about a workflow's activities: when each was scheduled, taken, done and acted on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client


@dataclass
class Taken:
    """An activity that completed. Seconds: until a worker took it, until it was done, until the workflow had acted."""

    name: str
    activity_id: str
    argument: dict[str, Any]
    result: Any
    dispatch_s: float
    inside_s: float
    hop_s: float

    @property
    def wall_s(self) -> float:
        return self.dispatch_s + self.inside_s + self.hop_s


async def activities(client: Client, workflow_id: str) -> list[Taken]:
    """In the order in which they completed; those that failed or were not acted on yet are left out."""
    history = await client.get_workflow_handle(workflow_id).fetch_history()
    return list(_read(history.events))


def _read(events: Any) -> Iterator[Taken]:
    scheduled: dict[int, Any] = {}
    started: dict[int, float] = {}
    waiting: list[tuple[int, Any, float]] = []  # done, and not acted on yet
    for event in events:
        at = _seconds(event.event_time)
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
            scheduled[event.event_id] = event
        elif event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED:
            started[event.activity_task_started_event_attributes.scheduled_event_id] = at
        elif event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
            completed = event.activity_task_completed_event_attributes
            waiting.append((completed.scheduled_event_id, _value(completed.result), at))
        elif event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED:
            for number, result, done in waiting:
                yield _taken(scheduled[number], result, started[number], done, at)
            waiting = []


def _taken(scheduled: Any, result: Any, started: float, done: float, acted: float) -> Taken:
    about = scheduled.activity_task_scheduled_event_attributes
    argument, at = _value(about.input) or {}, _seconds(scheduled.event_time)
    name, number = about.activity_type.name, about.activity_id
    return Taken(name, number, argument, result, started - at, done - started, acted - done)


def _value(payloads: Any) -> Any:
    """The first of what was given or returned."""
    return json.loads(payloads.payloads[0].data or "null") if payloads.payloads else None


def _seconds(time: Timestamp) -> float:
    return time.seconds + time.nanos / 1e9
