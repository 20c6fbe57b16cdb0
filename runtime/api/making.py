"""What a session or an agent may be made of: the checks of every way in, before anything is created."""

from __future__ import annotations

from fastapi import Request
from pydantic import ValidationError

from runtime.agents import Origin, merged, parse_agent
from runtime.api.models import (
    checked_model,
    ensure_answers_work,
    ensure_image,
    ensure_it_fits,
    ensure_reachable,
    ensure_tokens_exist,
    ensure_tools_work,
)
from runtime.api.problems import describe
from runtime.api.sealed import ensure_secrets
from runtime.config import SessionConfig, SessionIn, Wanted
from runtime.errors import InvalidRequest
from runtime.kept import as_kept
from runtime.store import Database, agents, domains, sessions
from sandbox import SandboxUsageError, snapshots


async def create(
    request: Request, db: Database, tenant: str, session_id: str, config: SessionConfig, seed: int, origin: Origin
) -> None:
    """Accept a session of a checked configuration. Raises Forbidden where the tenant has all that it may have."""
    domain = domains.domain_of(tenant, session_id, config.kv.share, request.app.state.kv_encryption)
    kept = as_kept(request.app.state.sealer, tenant, config)
    await sessions.create(db, tenant, session_id, kept, seed, domain=domain, origin=origin)


async def ensure_possible(request: Request, db: Database, tenant: str, config: SessionConfig) -> None:
    """Whatever a session is made from: that its image, tools, hosts and secrets are to be had here. Raises
    InvalidRequest."""
    await ensure_image(request, db, config)
    await ensure_tools_work(config)
    await ensure_answers_work(config)
    ensure_reachable(request, config)
    await ensure_secrets(db, tenant, config)


async def resolved(db: Database, tenant: str, body: SessionIn) -> tuple[Wanted, Origin]:
    """What the body means, and where it comes from. Raises InvalidRequest where what it says does not go with its
    agent."""
    if body.agent is None:
        return body, Origin(metadata=body.metadata)
    name, number = parse_agent(body.agent)
    version = await agents.usable(db, tenant, name, number)
    given = body.model_dump(exclude_unset=True, include=set(SessionConfig.model_fields))
    try:
        wanted = Wanted.model_validate(merged(version["config"], given))
    except ValidationError as error:
        param, message = describe(error.errors())
        raise InvalidRequest(f"with the agent {name}@{version['version']}: {message}", param=param) from None
    return wanted, Origin(name, version["version"], metadata={**version["metadata"], **body.metadata})


async def checked(request: Request, db: Database, tenant: str, wanted: Wanted) -> SessionConfig:
    """What is wanted, with the model that it is to have. Raises InvalidRequest, Unavailable."""
    served = await checked_model(db, wanted.model)
    config = wanted.config(served.name)
    try:
        snapshots.plan({name: text.encode() for name, text in config.files.items()})
    except SandboxUsageError as error:
        raise InvalidRequest(f"files: {error}", param="files") from error
    await ensure_possible(request, db, tenant, config)
    ensure_tokens_exist(config, served)
    await ensure_it_fits(request, db, config, served)
    return config
