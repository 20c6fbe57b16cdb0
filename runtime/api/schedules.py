"""`/v1/schedules`: sessions that begin by themselves, at times or at intervals."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal, Self

import asyncpg
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator
from temporalio.service import RPCError

from runtime import schedules
from runtime.agents import AGENT, parse_agent
from runtime.api import views
from runtime.api.documented import After, Id, Limit, Page, Shape, refusals
from runtime.api.guard import Db, Tenant
from runtime.api.idempotency import id_for, made_before
from runtime.api.problems import describe
from runtime.api.sending import send
from runtime.config import Body, MessageIn, Metadata, Wanted
from runtime.crons import check_cron, check_time_zone
from runtime.errors import InvalidRequest, Unavailable
from runtime.steps.firing import session_of
from runtime.store import agents
from runtime.store import schedules as store
from workflows.states import State

router = APIRouter(prefix="/v1/schedules", tags=["schedules"])

Overlap = Literal["skip", "buffer_one", "cancel_other", "allow_all"]
_EXAMPLE: dict[str, Any] = {
    "agent": "reviewer",
    "message": "Review what was merged since yesterday.",
    "cron": "0 9 * * mon-fri",
    "time_zone": "Europe/Berlin",
}
Agent = Annotated[str, Field(pattern=AGENT, max_length=80, description="`name` (its latest version), or `name@3`.")]
Seconds = Annotated[float, Field(ge=1, le=31_536_000)]


class Timing(Body):
    """When a schedule fires, and what becomes of a run that would begin while the last one works: `skip` it, begin it
    after that (`buffer_one`), cancel that (`cancel_other`), or let both work (`allow_all`)."""

    cron: str | None = Field(default=None, max_length=200)
    every_s: Seconds | None = None
    time_zone: str = Field(default="UTC", max_length=64)
    jitter_s: float = Field(default=0, ge=0, le=86_400)
    overlap: Overlap = "skip"
    catchup_s: float = Field(default=60, ge=10, le=31_536_000)

    @field_validator("cron")
    @classmethod
    def _can_be_read(cls, value: str | None) -> str | None:
        return None if value is None else check_cron(value)

    _zone = field_validator("time_zone")(check_time_zone)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.cron is None) == (self.every_s is None):
            raise ValueError("give either cron, or every_s")
        return self


class ScheduleIn(Timing):
    """The body of POST /v1/schedules. With `complete_when_idle` a run's session is completed once it rests.
    `catchup_s`: how late a run may begin that could not begin in time."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    agent: Agent
    message: str = Field(min_length=1, max_length=100_000)
    tool_choice: str = Field(default="auto", max_length=200)
    max_tool_rounds: int = Field(default=8, ge=0, le=1000)
    complete_when_idle: bool = True
    paused: bool = False
    description: str = Field(default="", max_length=2000)
    metadata: Metadata = Field(default_factory=dict, max_length=16, description="Which its sessions have too.")


class ChangeIn(Body):
    """The body of PATCH: what is not given stays. `cron` takes the place of `every_s`, and the other way round."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"cron": "0 10 * * *"}]})

    agent: Agent | None = None
    message: str | None = Field(default=None, min_length=1, max_length=100_000)
    tool_choice: str | None = Field(default=None, max_length=200)
    max_tool_rounds: int | None = Field(default=None, ge=0, le=1000)
    cron: str | None = Field(default=None, max_length=200)
    every_s: Seconds | None = None
    time_zone: str | None = Field(default=None, max_length=64)
    jitter_s: float | None = Field(default=None, ge=0, le=86_400)
    overlap: Overlap | None = None
    catchup_s: float | None = Field(default=None, ge=10, le=31_536_000)
    complete_when_idle: bool | None = None
    description: str | None = Field(default=None, max_length=2000)
    metadata: Annotated[Metadata, Field(max_length=16)] | None = None


class ScheduleOut(Shape):
    id: str
    object: Literal["schedule"] = "schedule"
    agent: str
    message: str
    tool_choice: str
    max_tool_rounds: int
    cron: str | None
    every_s: float | None
    time_zone: str
    jitter_s: float
    overlap: Overlap
    catchup_s: float
    complete_when_idle: bool
    paused: bool
    description: str
    metadata: dict[str, str]
    created_at: datetime.datetime
    updated_at: datetime.datetime


class ScheduleTimes(ScheduleOut):
    """With its next times; null where that is not known now."""

    next_runs: list[datetime.datetime] | None


class RunOut(Shape):
    """One firing, and the session that it made; null where none could be, and `error` says why."""

    id: str
    object: Literal["schedule.run"] = "schedule.run"
    session_id: str | None
    state: State | None = Field(description="Of the session, as long as its record is kept.")
    error: str | None
    created_at: datetime.datetime


class TriggeredOut(Shape):
    """A run that begins now. Its session is there in a moment, under this id."""

    id: str
    object: Literal["schedule.run"] = "schedule.run"
    session_id: str


class Deleted(Shape):
    id: str
    object: Literal["schedule"] = "schedule"
    deleted: bool = True


@router.post("", status_code=201, responses=refusals(409))
async def create(body: ScheduleIn, request: Request, db: Db, tenant: Tenant) -> ScheduleOut:
    """Make a schedule: an agent, a message, and when."""
    before = await made_before(request, db, tenant)
    if before is None or not await store.exists(db, before):
        plan = await _checked(db, tenant, body)
        before = await id_for(request, db, tenant, "sch")
        await store.create(db, tenant, before, plan, paused=body.paused)
        _tell(request, db, before)
    return ScheduleOut(**_view(await store.get(db, tenant, before)))


@router.get("")
async def list_schedules(db: Db, tenant: Tenant, limit: Limit = 100, after: After = None) -> Page[ScheduleOut]:
    """Schedules of the tenant, oldest first."""
    rows = await store.listed(db, tenant, limit, after)
    return Page[ScheduleOut](**views.page([_view(row) for row in rows], limit))


@router.get("/{schedule_id}", responses=refusals(404))
async def get(schedule_id: Id, request: Request, db: Db, tenant: Tenant) -> ScheduleTimes:
    """One schedule, and when it fires next."""
    row = await store.get(db, tenant, schedule_id)
    times = await schedules.next_times(request.app.state.temporal, schedule_id)
    return ScheduleTimes(**_view(row), next_runs=times)


@router.patch("/{schedule_id}", responses=refusals(404))
async def change(schedule_id: Id, body: ChangeIn, request: Request, db: Db, tenant: Tenant) -> ScheduleOut:
    """From its next firing on."""
    while True:  # somebody else may change it meanwhile, and is not undone
        row = await store.get(db, tenant, schedule_id)
        if await store.change(db, tenant, schedule_id, await _changed(db, tenant, row, body), row["revision"]):
            break
    _tell(request, db, schedule_id)
    return ScheduleOut(**_view(await store.get(db, tenant, schedule_id)))


async def _changed(db: Db, tenant: str, row: asyncpg.Record, body: ChangeIn) -> store.Plan:
    said = {name: value for name, value in _view(row).items() if name in ScheduleIn.model_fields}
    given = body.model_dump(exclude_none=True)
    if "cron" in given or "every_s" in given:
        said |= {"cron": None, "every_s": None}
    try:
        wanted = ScheduleIn.model_validate({**said, **given})
    except ValidationError as error:
        param, message = describe(error.errors())
        raise InvalidRequest(message, param=param) from None
    return await _checked(db, tenant, wanted)


@router.post("/{schedule_id}/pause", responses=refusals(404))
async def pause(schedule_id: Id, request: Request, db: Db, tenant: Tenant) -> ScheduleOut:
    """It fires no more until it is unpaused; runs that work go on. Idempotent."""
    await store.pause(db, tenant, schedule_id, True)
    _tell(request, db, schedule_id)
    return ScheduleOut(**_view(await store.get(db, tenant, schedule_id)))


@router.post("/{schedule_id}/unpause", responses=refusals(404))
async def unpause(schedule_id: Id, request: Request, db: Db, tenant: Tenant) -> ScheduleOut:
    """Idempotent. What would have fired meanwhile does not."""
    await store.pause(db, tenant, schedule_id, False)
    _tell(request, db, schedule_id)
    return ScheduleOut(**_view(await store.get(db, tenant, schedule_id)))


@router.post("/{schedule_id}/trigger", status_code=202, responses=refusals(404, 409))
async def trigger(schedule_id: Id, request: Request, db: Db, tenant: Tenant) -> TriggeredOut:
    """One run now, beside whatever runs, paused or not."""
    await store.get(db, tenant, schedule_id)
    firing = f"scheduled/{schedule_id}/{await id_for(request, db, tenant, 'trg')}"
    try:
        await schedules.trigger(request.app.state.temporal, schedule_id, firing)
    except RPCError as error:
        raise Unavailable(f"Temporal does not answer: {error}") from None
    return TriggeredOut(id=firing, session_id=session_of(firing))


@router.get("/{schedule_id}/runs", responses=refusals(404))
async def list_runs(schedule_id: Id, db: Db, tenant: Tenant, limit: Limit = 100, after: After = None) -> Page[RunOut]:
    """Newest first."""
    await store.get(db, tenant, schedule_id)
    rows = await store.runs(db, schedule_id, limit, after)
    return Page[RunOut](**views.page([_run(row) for row in rows], limit))


@router.delete("/{schedule_id}", responses=refusals(404))
async def delete(schedule_id: Id, request: Request, db: Db, tenant: Tenant) -> Deleted:
    """It fires no more. Sessions that it made stay."""
    await store.delete(db, tenant, schedule_id)
    _tell(request, db, schedule_id)
    return Deleted(id=schedule_id)


async def _checked(db: Db, tenant: str, body: ScheduleIn) -> store.Plan:
    """Raises InvalidRequest where the agent is not there, or has no such tool."""
    name, number = parse_agent(body.agent)
    version = await agents.usable(db, tenant, name, number)
    message = MessageIn(content=body.message, tool_choice=body.tool_choice, max_tool_rounds=body.max_tool_rounds)
    try:
        message.check_against(Wanted.model_validate(version["config"]))
    except ValueError as error:
        raise InvalidRequest(f"tool_choice: {error}", param="tool_choice") from None
    return store.Plan(
        body.description,
        name,
        number,
        message.model_dump(include={"content", "tool_choice", "max_tool_rounds"}),
        body.metadata,
        body.model_dump(include=set(Timing.model_fields)),
        body.complete_when_idle,
    )


def _tell(request: Request, db: Db, schedule_id: str) -> None:
    send(request, schedules.apply(request.app.state.temporal, db, schedule_id))


def _view(row: asyncpg.Record) -> dict[str, Any]:
    message = row["message"]
    number = row["agent_version"]
    return {
        "id": row["schedule_id"],
        "agent": row["agent_name"] if number is None else f"{row['agent_name']}@{number}",
        "message": message["content"],
        "tool_choice": message["tool_choice"],
        "max_tool_rounds": message["max_tool_rounds"],
        **row["timing"],
        "paused": row["paused_at"] is not None,
        **{name: row[name] for name in ("complete_when_idle", "description", "metadata", "created_at", "updated_at")},
    }


def _run(row: asyncpg.Record) -> dict[str, Any]:
    same = ("session_id", "state", "error", "created_at")
    return {"id": row["firing"], **{name: row[name] for name in same}}
