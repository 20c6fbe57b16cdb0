"""`/v1/agents`: what sessions are made of, under a name, in versions that never change."""

from __future__ import annotations

import datetime
import json
from typing import Annotated, Any, Literal

import asyncpg
from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import ConfigDict, Field

from runtime.agents import AGENT_NAME
from runtime.api import views
from runtime.api.documented import After, Limit, Page, Shape, refusals
from runtime.api.guard import Db, Tenant
from runtime.api.idempotency import id_for, made_before
from runtime.api.making import checked
from runtime.config import Approval, Given, KvPolicy, Limits, Metadata, OnBusy, Wanted
from runtime.errors import InvalidRequest, NotFound
from runtime.generation import ResponseFormat, Sampling
from runtime.kept import as_kept
from runtime.store import agents
from runtime.tools.kinds import shown

router = APIRouter(prefix="/v1/agents", tags=["agents"])

Name = Annotated[str, Path(pattern=rf"^{AGENT_NAME}$", max_length=63, description="The agent's name.")]
Number = Annotated[int, Path(ge=1, lt=2**31)]
_EXAMPLE: dict[str, Any] = {"description": "Reviews changes.", "system": "You are brief.", "tools": ["bash"]}


class VersionIn(Given):
    """The body of POST …/versions: the whole of what sessions of this version are made of."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    description: str = Field(default="", max_length=2000)
    metadata: Metadata = Field(default_factory=dict, max_length=16, description="Which its sessions have too.")


class AgentIn(VersionIn):
    """The body of POST /v1/agents: a name, and the first version."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "reviewer", **_EXAMPLE}]})

    name: str = Field(pattern=rf"^{AGENT_NAME}$", max_length=63)


class Content(Shape):
    """What sessions of a version are made of. Values of tools are shown as ***, secrets by their names."""

    model: str = Field(description="Empty: whichever is served when a session is made.")
    system: str | None
    tools: list[str | dict[str, Any]]
    files: dict[str, str]
    image: str | None
    egress: list[str]
    limits: Limits
    sampling: Sampling
    response_format: ResponseFormat | None = None
    parallel_tool_calls: bool | None = None
    kv: KvPolicy
    approvals: dict[str, Approval]
    budget: dict[str, Any]
    on_busy: OnBusy
    context_policy: Literal["fail", "drop_tool_output", "summarise"]
    description: str
    metadata: dict[str, str]


class VersionOut(Content):
    """One version. It never changes."""

    id: int = Field(description="Its number.")
    object: Literal["agent.version"] = "agent.version"
    name: str
    created_at: datetime.datetime


class AgentOut(Content):
    """An agent, with the content of its latest version."""

    id: str = Field(description="Its name.")
    object: Literal["agent"] = "agent"
    version: int = Field(description="The latest.")
    archived_at: datetime.datetime | None
    created_at: datetime.datetime
    updated_at: datetime.datetime


@router.post("", status_code=201, responses=refusals(409))
async def create(body: AgentIn, request: Request, db: Db, tenant: Tenant) -> AgentOut:
    """Make an agent. All that it says is checked as a session's would be."""
    before = await made_before(request, db, tenant)
    if before is None or not await agents.made(db, tenant, before):
        content = await _content(body, request, db, tenant)
        await agents.create(db, tenant, body.name, await id_for(request, db, tenant, "agv"), content)
    return await get(body.name, db, tenant)


@router.get("")
async def list_agents(
    db: Db,
    tenant: Tenant,
    limit: Limit = 100,
    after: After = None,
    archived: Annotated[bool, Query(description="Those that are archived as well.")] = False,
) -> Page[AgentOut]:
    """By name."""
    rows = await agents.listed(db, tenant, limit, after, archived)
    return Page[AgentOut](**views.page([_agent(row) for row in rows], limit))


@router.get("/{agent}", responses=refusals(404))
async def get(agent: Name, db: Db, tenant: Tenant) -> AgentOut:
    """The agent and its latest version."""
    return AgentOut.model_validate(_agent(await agents.get(db, tenant, agent)))


@router.post("/{agent}/versions", status_code=201, responses={200: {"model": VersionOut}, **refusals(404, 409)})
async def revise(
    agent: Name, body: VersionIn, request: Request, response: Response, db: Db, tenant: Tenant
) -> VersionOut:
    """Make the next version: all of it, not what differs. What equals the latest version is that version (200)."""
    content = await _content(body, request, db, tenant)
    number, is_new = await agents.revise(db, tenant, agent, await id_for(request, db, tenant, "agv"), content)
    response.status_code = 201 if is_new else 200
    return await get_version(agent, number, db, tenant)


@router.get("/{agent}/versions", responses=refusals(404))
async def list_versions(
    agent: Name, db: Db, tenant: Tenant, limit: Limit = 100, after: After = None
) -> Page[VersionOut]:
    """Newest first."""
    if after is not None and not (after.isascii() and after.isdigit() and int(after) < 2**31):
        raise InvalidRequest(f"after is {after!r}; the last_id of a page is needed", param="after")
    rows = await agents.versions(db, tenant, agent, limit, int(after) if after else None)
    if not rows and after is None:
        raise NotFound(f"there is no agent {agent}")
    return Page[VersionOut](**views.page([_version(row) for row in rows], limit))


@router.get("/{agent}/versions/{number}", responses=refusals(404))
async def get_version(agent: Name, number: Number, db: Db, tenant: Tenant) -> VersionOut:
    """One version, as it will always be."""
    return VersionOut.model_validate(_version(await agents.version(db, tenant, agent, number)))


@router.post("/{agent}/archive", responses=refusals(404))
async def archive(agent: Name, db: Db, tenant: Tenant) -> AgentOut:
    """No new sessions are made of it; those that there are go on. Idempotent."""
    await agents.archive(db, tenant, agent)
    return await get(agent, db, tenant)


async def _content(body: VersionIn, request: Request, db: Db, tenant: str) -> agents.Content:
    await checked(request, db, tenant, body)
    wanted = Wanted.model_validate(body.model_dump(include=set(Wanted.model_fields)))
    about = {"description": body.description, "metadata": body.metadata}
    sealer = request.app.state.sealer
    digest = sealer.mac(tenant, json.dumps({**wanted.model_dump(mode="json"), **about}, sort_keys=True))
    return agents.Content(as_kept(sealer, tenant, wanted), digest, body.description, body.metadata)


def _content_of(row: asyncpg.Record) -> dict[str, Any]:
    wanted = Wanted.model_validate(row["config"])
    tools = [shown(tool) for tool in row["config"]["tools"]]
    said = {"tools": tools, "description": row["description"], "metadata": row["metadata"]}
    return {**wanted.model_dump(mode="json"), **said}


def _agent(row: asyncpg.Record) -> dict[str, Any]:
    times = {name: row[name] for name in ("archived_at", "created_at", "updated_at")}
    return {"id": row["name"], "version": row["latest"], **times, **_content_of(row)}


def _version(row: asyncpg.Record) -> dict[str, Any]:
    return {"id": row["version"], "name": row["name"], "created_at": row["created_at"], **_content_of(row)}
