"""What collections return. Fields that are not named here are kept too, as attributes."""

from __future__ import annotations

import datetime
from typing import Any

from pydantic import Field

from tenuto.models import _Open


class Agent(_Open):
    """What sessions are made of, under the name `id`, as its latest version says."""

    id: str
    version: int
    description: str = ""
    model: str = ""
    system: str | None = None
    tools: list[str | dict[str, Any]] = Field(default_factory=list)
    archived_at: datetime.datetime | None = None


class AgentVersion(_Open):
    """One version of an agent, which never changes; `id` is its number."""

    id: int
    name: str = ""
    description: str = ""
    model: str = ""
    system: str | None = None
    tools: list[str | dict[str, Any]] = Field(default_factory=list)


class Schedule(_Open):
    """Sessions of an agent by `cron` or every `every_s` seconds; `next_runs` where one was asked for."""

    id: str
    agent: str
    message: str
    cron: str | None = None
    every_s: float | None = None
    time_zone: str = "UTC"
    paused: bool = False
    next_runs: list[datetime.datetime] | None = None


class ScheduleRun(_Open):
    """One run of a schedule: its session, or why there is none."""

    id: str
    session_id: str | None = None
    state: str | None = None
    error: str | None = None


class Secret(_Open):
    """A secret by the name `id`; its value is shown to nobody."""

    id: str
    created_at: datetime.datetime
    updated_at: datetime.datetime
    last_used_at: datetime.datetime | None = None


class Webhook(_Open):
    """Where events of these `types` are sent; `secret`: in the answer that made or turned it only."""

    id: str
    url: str
    types: list[str]
    description: str = ""
    disabled: bool = False
    disabled_why: str | None = None
    secret: str | None = None


class Delivery(_Open):
    """One event on its way to a webhook."""

    id: str
    webhook: str
    type: str
    state: str
    attempts: int = 0
    session_id: str | None = None
    last_status: int | None = None
    last_error: str | None = None


class Key(_Open):
    """An API key; `key`, the key itself, is in the answer that made it only."""

    id: str
    tenant: str
    scope: str
    name: str = ""
    state: str = "active"
    requests_per_minute: int | None = None
    expires_at: datetime.datetime | None = None
    key: str | None = None


class Tenant(_Open):
    """A tenant and what it may use; a quota of None is any amount."""

    id: str
    state: str
    quotas: dict[str, int | None] = Field(default_factory=dict)


class UsageRow(_Open):
    """What was used by the tenant, session, model or day `id`. `cost`: by the server's price file, if it has one."""

    id: str
    sessions: int
    steps: int
    sampled_tokens: int
    prefilled_tokens: int | None = None
    cached_tokens: int | None = None
    cost: float | None = None
    currency: str | None = None
